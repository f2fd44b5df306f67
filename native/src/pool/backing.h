// Backing: the bytes of a pool, wherever they are kept.
//
// What is written is read back at once. When it survives what, the three steps say: a killed
// process loses nothing that Write() has taken; after Drain() the calling thread's writes have left
// the processor's caches; after Sync() all writes that were drained before survive a power failure.
// Between two Syncs any part of them may have become durable, in any order.
//
// Offsets count from the beginning; no call reaches beyond size(). Read(), Write() and Drain() may
// be called by several threads at once, each with bytes of its own. A Write() of 8 aligned bytes is
// never torn, neither for readers nor by a crash: records end by one (row_record.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace persia::pool {

struct ReadPiece {
  uint64_t offset;
  std::span<std::byte> out;
};

class Backing {
 public:
  virtual ~Backing() = default;

  virtual uint64_t size() const = 0;
  virtual Status Read(uint64_t offset, std::span<std::byte> out) const = 0;
  virtual Status Write(uint64_t offset, std::span<const std::byte> bytes) = 0;
  // Of the calling thread's writes alone: others drain their own.
  virtual void Drain() = 0;
  // Waits for the device. After an error nothing is known of the writes since the last success.
  virtual Status Sync() = 0;
  // All of them, in about the time that the device needs for many reads at once.
  virtual Status ReadMany(std::span<const ReadPiece> pieces) const {
    for (const ReadPiece& piece : pieces) PERSIA_RETURN_IF_ERROR(Read(piece.offset, piece.out));
    return Status::Ok();
  }
  // From now on bytes are read here and there: what lies beside them is not worth reading.
  virtual void ExpectRandomReads() {}
  // Brings mapped bytes into the processor's caches: for many rows at once, before their turn.
  virtual void Touch(uint64_t /*offset*/, uint64_t /*count*/) const {}
  // Where the bytes are mapped; null: read them. The caller stays below size().
  virtual const std::byte* Mapped(uint64_t /*offset*/) const { return nullptr; }
  // To `size` bytes, the new ones zero. kResourceExhausted: there is no room for them.
  virtual Status Grow(uint64_t size) = 0;
};

}  // namespace persia::pool

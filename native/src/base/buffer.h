// Buffer: the bytes of one message or batch, 64-byte aligned, movable, uninitialised until written.
//
// Messages are read from the network straight into a Buffer and their arrays are used where they
// lie, so alignment is a contract: data() is aligned to 64 bytes and every array inside a message
// starts at a multiple of 8 (see base/bytes.h and docs/wire_format.md). Not thread-safe; move it,
// do not share it.
//
// Large buffers are used again: asking the system for the pages of every message or batch costs
// more than writing them. Up to kMaxKeptBytes lie ready for the whole process, in huge pages where
// the system grants them; beyond that the ones that have waited longest go back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/mapped_memory.h"

namespace persia {

class Buffer {
 public:
  // What all kept blocks of the process may take together, beside the buffers in use. It bounds
  // what a process that once handled a huge batch holds on to.
  static constexpr size_t kMaxKeptBytes = size_t{512} << 20;

  // Empty: data() is null and size() is 0.
  Buffer() = default;
  // The bytes are uninitialised: the code that sends a Buffer must have written every byte of
  // it, padding included. Running out of memory ends the process, for nothing that a message needs
  // could be answered any more.
  explicit Buffer(size_t size_bytes);
  // A move keeps the bytes where they are, so views of them stay valid. Decoders rely on that: they
  // move a body into the message that views it.
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        block_(std::move(other.block_)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(block_, other.block_);
    return *this;
  }
  ~Buffer();

  // Of large buffers that wait to be used again.
  // Takes the lock of the kept blocks. For tests and metrics.
  static size_t KeptBytes();

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> span() { return {data_, size_}; }
  std::span<const std::byte> span() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  MappedMemory block_;  // of a large buffer; a small one is on the heap
};

}  // namespace persia

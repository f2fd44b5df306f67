// The first bytes of a pool: what it is, and which checkpoint it goes back to.
//
// There are two copies, each with a sequence number and a checksum, written in turns: whatever
// happens to the one that is being written, the other stays. Behind them lie extents, all of one
// size; an extent begins with the size of its slots and a number that is drawn whenever it is given
// one. Records are valid with that number alone: what an extent has from before counts for nothing,
// and need not be erased. Extents, in turn, are valid with the number of the pool's filling alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "pool/backing.h"

namespace persia::pool {

struct PoolHeader {
  static constexpr uint64_t kCopyBytes = 4096;
  static constexpr uint64_t kBytes = 2 * kCopyBytes;  // where the first extent begins
  static constexpr size_t kMaxSchemaBytes = 3072;

  uint64_t sequence = 0;
  uint64_t pool_id = 0;     // of this pool alone, for good: what lies beside it may say whose it is
  uint64_t filling_id = 0;  // of its rows since it was made or cleared: older extents are void
  uint64_t committed = 0;   // the checkpoint that recovery goes back to; 0: none yet
  uint64_t num_rows = 0;    // at that checkpoint
  uint64_t extent_bytes = 0;
  uint64_t size_bytes = 0;  // that the pool may grow to
  std::string schema;       // what its rows consist of, as its user says; empty: not said yet
};

// Of the two copies the newer that is whole. kCorruption: neither is, or it is no pool;
// kFailedPrecondition: of another version of the format.
StatusOr<PoolHeader> ReadHeader(const Backing& backing);
// In the place of the older copy, with the next sequence number. Not durable yet.
Status WriteHeader(PoolHeader* header, Backing* backing);

struct ExtentHeader {
  static constexpr uint64_t kBytes = 64;

  uint32_t slot_bytes = 0;
  uint64_t id = 0;
};
// For pools, their fillings and extents.
uint64_t DrawId();
Status WriteExtentHeader(uint64_t filling_id, uint64_t offset, const ExtentHeader& header,
                         Backing* backing);
// Nothing where the extent has no slots.
StatusOr<std::optional<ExtentHeader>> ReadExtentHeader(uint64_t filling_id, uint64_t offset,
                                                       const Backing& backing);

}  // namespace persia::pool

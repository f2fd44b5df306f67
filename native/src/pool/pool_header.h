// The first bytes of a pool: what it is, and which checkpoint it goes back to.
//
// There are two copies, each with a sequence number and a checksum, written in turns: whatever
// happens to the one that is being written, the other stays. Behind them lie extents, all of one
// size; an extent begins with the size of its cells and a number that is drawn whenever it is given
// one. Records are valid with that number alone: what an extent has from before counts for nothing,
// and need not be erased. Extents, in turn, are valid with the number of the pool's filling alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "pool/backing.h"

namespace persia::pool {

// The numbers of a header, in the order in which the file has them.
struct PoolState {
  uint64_t sequence = 0;    // of writes of the header: the copy with the greater one is newer
  uint64_t pool_id = 0;     // of this pool alone, for good: files beside it name their pool by it
  uint64_t filling_id = 0;  // of its rows since it was made or cleared: older extents are void
  uint64_t committed = 0;   // the checkpoint that recovery goes back to; 0: none yet
  uint64_t num_rows = 0;    // at that checkpoint
  uint64_t extent_bytes = 0;
  uint64_t size_bytes = 0;  // that the pool may grow to
};

struct PoolHeader : PoolState {
  static constexpr uint64_t kCopyBytes = 4096;        // a page: what a device writes as a whole
  static constexpr uint64_t kBytes = 2 * kCopyBytes;  // where the first extent begins
  static constexpr size_t kMaxSchemaBytes = 3072;

  std::string schema;  // what its rows consist of, as its user says; empty: not known yet
};

// Returns the newer of the two copies that is whole. kCorruption: neither is, or it is no pool;
// kFailedPrecondition: of another version of the format.
StatusOr<PoolHeader> ReadHeader(const Backing& backing);
// Writes the header in the place of the older copy, with the next sequence number. The caller calls
// Sync(): until then a power failure may leave the copy before as the newer one.
Status WriteHeader(PoolHeader* header, Backing* backing);

// Raises what the pool may grow to. kInvalidArgument: `size_bytes` is less than it is.
Status RaiseSize(uint64_t size_bytes, PoolHeader* header);

struct ExtentHeader {
  static constexpr uint64_t kBytes = 64;  // a cache line, so that cells begin on one

  uint32_t cell_bytes = 0;
  uint64_t id = 0;  // a part of the seed of its records' checksums
};
// Draws an id of a pool, a filling or an extent. Random, not counted: a counter that is lost in a
// crash would give out a number twice, and with it make old records valid again.
uint64_t DrawId();
// `offset` is where the extent begins. The header is flushed, and durable with the next Sync().
Status WriteExtentHeader(uint64_t filling_id, uint64_t offset, const ExtentHeader& header,
                         Backing* backing);
// Nothing where the extent has no cells, or has them of an earlier filling.
StatusOr<std::optional<ExtentHeader>> ReadExtentHeader(uint64_t filling_id, uint64_t offset,
                                                       const Backing& backing);

}  // namespace persia::pool

// SlabMemory: where the slabs of all shards of a store come from.
//
// Blocks of 2 MiB, one huge page each, are cut into slabs from front to back, for whichever shard
// asks. So a store has one unfinished block, not one for each of its shards and dims, and slabs can
// be small while there are few rows without costing them their huge pages.
//
// While there are so few rows that an unfinished huge page would weigh more than 6 bytes a row,
// blocks are filled on small pages, of which only those that hold something take memory, and made
// huge once they are full, or have no room for a row that comes.
//
// A block goes back to the system with the last of its slabs, and pages of slabs that were given
// back before; such slabs are the first to be taken again. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/mapped_memory.h"

namespace persia::store {

struct SlabPiece {
  std::shared_ptr<MappedMemory> block;  // keeps `data` alive
  std::byte* data = nullptr;            // null when there is no memory; else on a cache line
  size_t size = 0;
};

class SlabMemory {
 public:
  static constexpr size_t kBlockBytes = MappedMemory::kHugePageBytes;
  // Wider rows would leave too much at the end of a block and get memory of their own.
  static constexpr size_t kMaxSharedRowBytes = kBlockBytes / 128;

  // Room for `num_rows` rows, or for fewer, at least one, where the block ends, or for some
  // more, where rows are wide.
  SlabPiece Take(size_t row_bytes, size_t num_rows);
  // Of a slab that is no longer used.
  void Give(SlabPiece piece);
  // After all rows of the store have gone.
  void Clear();
  // Memory that is there beside the pieces taken.
  uint64_t unused_bytes() const;

 private:
  struct Given {
    SlabPiece piece;
    size_t kept_bytes;  // of pages that it has only in part
  };
  using Blocks = std::vector<std::shared_ptr<MappedMemory>>;

  SlabPiece TakeShared(size_t row_bytes, size_t num_rows, Blocks* finished);
  // Of the pieces that were given back one with room for half the rows, or nothing; of the block
  // that has the fewest of them: others may be rid of their last slabs.
  SlabPiece TakeGiven(size_t row_bytes, size_t num_rows);
  // The caller has the mutex, also of these. Pages of what was given back of a finished block, or
  // all of it.
  void ReleaseGiven(const std::shared_ptr<MappedMemory>& block);
  // Blocks that are to move to huge pages, without the mutex, are added to *finished.
  bool OpenBlock(Blocks* finished);
  void FinishBlock(Blocks* finished);

  mutable std::mutex mutex_;
  std::shared_ptr<MappedMemory> block_;  // the unfinished one; null: there is none
  size_t block_used_ = 0;
  bool block_is_huge_ = false;
  uint64_t num_rows_ = 0;  // that pieces were cut for
  std::vector<Given> given_;
};

}  // namespace persia::store

// SignsByShard: the signs of one request, grouped by internal shard.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/types.h"

namespace persia::store {

// The signs of one request, grouped by internal shard, in the order of the call within each shard.
//
// Objects are reused, by a thread or by RecentLookups: one allocates nothing once it has seen the
// largest request.
class SignsByShard {
 public:
  static SignsByShard& OfThread() {
    thread_local SignsByShard signs;
    return signs;
  }

  // kInvalidArgument: a dim of 0 or above kMaxDim, or 2^32 rows or more.
  Status Build(std::span<const RowBlock> blocks, uint32_t num_shards);

  // Whether Build() would make the same of `blocks`, for as many shards.
  bool AreOf(std::span<const RowBlock> blocks) const;
  size_t num_rows() const { return keys_.size(); }
  size_t memory_bytes() const {
    return blocks_.capacity() * sizeof(Block) + keys_.capacity() * sizeof(uint64_t) +
           refs_.capacity() * sizeof(RowRef) + ends_.capacity() * sizeof(uint32_t) +
           runs_.capacity() * sizeof(Run);
  }

  bool IsEmpty(uint32_t shard) const { return ends_[shard] == ends_[shard + 1]; }
  // Valid until the next call on this object.
  std::span<const Run> RunsOf(uint32_t shard);

 private:
  struct Block {
    uint64_t first_row;
    uint64_t first_float;
    uint32_t dim;
  };

  Status AddBlocks(std::span<const RowBlock> blocks);

  std::vector<Block> blocks_;
  std::vector<uint64_t> keys_;  // by row
  std::vector<RowRef> refs_;    // by shard
  std::vector<uint32_t> ends_;  // shard s has refs_[ends_[s], ends_[s + 1])
  std::vector<Run> runs_;
};

}  // namespace persia::store

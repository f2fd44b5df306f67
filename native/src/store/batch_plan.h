// BatchPlan: the signs of one request, grouped by internal
// shard, in the order of the call within each shard.
//
// Reused from call to call by its thread, so that a request
// allocates nothing once the largest has been seen.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/embedding_store.h"

namespace persia::store {

struct RowRef {
  uint64_t key;  // SignKey of the sign
  uint32_t row;  // its number in the request
};

// Rows of one shard and one block.
struct Run {
  uint32_t dim;
  uint64_t first_row;    // of the block
  uint64_t first_float;  // of the block, in the request's floats
  std::span<const RowRef> refs;

  uint64_t FloatOffset(const RowRef& ref) const {
    return first_float + (ref.row - first_row) * dim;
  }
};

// A row of a request that was not found.
struct MissingRef {
  const Run* run;
  const RowRef* ref;
};

class BatchPlan {
 public:
  static BatchPlan& OfThread() {
    thread_local BatchPlan plan;
    return plan;
  }

  // Refuses dims of 0 or above EmbeddingStore::kMaxDim, and 2^32 rows or more.
  Status Build(std::span<const RowBlock> blocks, uint32_t num_shards);

  bool IsEmpty(uint32_t shard) const { return ends_[shard] == ends_[shard + 1]; }
  // Valid until the next call on this plan.
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

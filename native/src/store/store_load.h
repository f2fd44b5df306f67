// StoreLoad: brings rows of a checkpoint into a store, with their state and their place in the
// order of eviction.
//
// Ages are what a snapshot said: batches between a row's last use and the cut. A row gets the stamp
// of that many batches ago, so that loaded rows are evicted in their old order, before all rows
// that are used from now on. Where more rows come than the store has room for, the oldest of all
// go: while loading, a shard may exceed its capacity by a quarter, so that the order in which rows
// come makes no difference to which of them stay.
//
// Add() may be called by several threads at once. Must not outlive its store.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/train_config.h"
#include "store/embedding_store.h"
#include "store/types.h"

namespace persia::store {

class StoreLoad {
 public:
  // kFailedPrecondition: a snapshot or another loading is under way.
  static StatusOr<std::unique_ptr<StoreLoad>> Begin(EmbeddingStore& store);
  ~StoreLoad();

  // Whether Replace() would refuse the config; changes nothing.
  Status Check(const TrainConfig& config) const;
  // Removes all rows and configures the store anew. kInvalidArgument: as Check(); the rows stay.
  Status Replace(const TrainConfig& config);
  // Before the first Add(): about so many rows will come. Only to be faster.
  void Reserve(uint64_t num_rows);
  // A sign that has a row gets the new one in its place. Needs a configured store.
  // kResourceExhausted: no memory.
  Status Add(const LoadedRows& rows);
  // In one step: a call of others for the store comes before all of it or after; meanwhile they
  // wait. Else as Add().
  Status Apply(const Changes& changes);
  // Removes what is beyond the capacity, the oldest rows of each internal shard.
  void Finish();
  // Rows that had no room so far; all of them after Finish().
  uint64_t num_evicted() const { return num_evicted_.load(); }

 private:
  explicit StoreLoad(ShardSet* shards);
  // The caller holds the store's mutex.
  void ReserveLocked(uint64_t num_rows);
  Status AddLocked(const LoadedRows& rows);

  ShardSet& shards_;
  std::atomic<uint64_t> num_evicted_ = 0;
};

}  // namespace persia::store

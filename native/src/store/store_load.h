// StoreLoad: brings rows of a checkpoint into a store, with their state and their place in the
// order of eviction.
//
// Either Replace() and Add(), for a whole checkpoint, or Apply(), for the changes of a packet; then
// Finish(). From Begin() until it is destroyed no snapshot of the store can begin, and no other
// loading; lookups and updates go on.
//
// Ages are what a snapshot said: batches between a row's last use and the snapshot point. A row
// gets the stamp of that many batches ago, so that loaded rows are evicted in their old order,
// before all rows that are used from now on. Where more rows come than the store has room for, the
// oldest of all are evicted: while loading, a shard may exceed its capacity by a quarter, so that
// the order in which rows come makes no difference to which of them stay.
//
// With a tier, loaded rows go through the cache of their shard: Add() demotes as many as it has too
// many.
//
// Add() may be called by several threads at once, the other methods by one. Must not outlive its
// store.
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
  // Before the first Add(): about so many rows will come, in the whole store. Only to be faster: an
  // index that grows on its own is copied each time.
  void Reserve(uint64_t num_rows);
  // A sign that has a row gets the new one in its place. Needs a configured store whose shapes are
  // those of the rows, which the caller checks: state is copied as it is. kResourceExhausted: no
  // memory, or no room in the tier; rows before the one that failed are loaded.
  Status Add(const LoadedRows& rows);
  // In one step: a call of others for the store comes before all of it or after; meanwhile they
  // wait. Else as Add().
  Status Apply(const Changes& changes);
  // Removes what is beyond the capacity, the oldest rows of each internal shard. The destructor
  // does so as well.
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

// EmbeddingBags: pooled lookups and updates of a store in this process, without servers, messages
// or copies of rows.
//
// The engine of persia.nn.EmbeddingBagCollection. It plans a batch like an embedding worker does
// (slot_table.h, unique_keys.h, bags.h) and touches the store's rows where they lie
// (in_place_rows.h). Feature groups are divided among the threads of a pool: their signs are
// disjoint. Neither bits nor order of eviction depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "base/train_config.h"
#include "client/bag_batch.h"
#include "store/embedding_store.h"
#include "store/in_place_rows.h"
#include "worker/slot_table.h"

namespace persia::client {

// Pieces begin .. end.
struct WorkRun {
  size_t begin = 0;
  size_t end = 0;
};

// At most `num_runs` runs (one for each piece where those are fewer), none empty, which together
// are all pieces in their order. A run ends where its share of the cost of all comes nearest.
std::vector<WorkRun> DivideWork(std::span<const double> costs, size_t num_runs);

// Checked by Create(), which names the slot that is at fault.
struct EmbeddingBagsOptions {
  std::vector<worker::SlotConfig> slots;  // pooled ones only; output columns follow their order
  uint32_t feature_index_prefix_bit = 8;
  store::EmbeddingStore::Options store;
  // The caller's thread counts. More than there are processors for only costs wake-ups.
  uint32_t num_threads = 1;
};

// A batch that was looked up for training, until its gradient comes.
using BagBatchPtr = std::shared_ptr<BagBatch>;

struct PooledBags {
  Buffer rows;  // float32 [batch_size, num_columns]
  uint32_t batch_size = 0;
  BagBatchPtr batch;  // null after a lookup for inference
};

// Thread-safe: batches are handled one after the other.
class EmbeddingBags {
 public:
  // kInvalidArgument: as SlotTable and EmbeddingStore refuse; a raw slot; no threads.
  static StatusOr<std::unique_ptr<EmbeddingBags>> Create(EmbeddingBagsOptions options);

  uint32_t num_slots() const { return static_cast<uint32_t>(slots_by_position_.size()); }
  // The sum of the slots' dims.
  uint32_t num_columns() const { return static_cast<uint32_t>(num_columns_); }

  // Required before a lookup for training. `replace` permits another config where rows do not
  // depend on the difference.
  Status Configure(const TrainConfig& config, bool replace);

  // `values`: the IDs, slot after slot, sample after sample. `lengths`: [num_slots, batch_size],
  // how many of them each bag has. kInvalidArgument names the slot and sample of a negative length,
  // or says that the lengths do not add up to the values. `weights`: one a value, finite, or none
  // for all 1. kResourceExhausted: see InPlaceRows::Insert.
  // What the spans view is not used after the return. Rows of the batch may be evicted by later
  // batches before its update: their gradients are then counted as missing.
  StatusOr<PooledBags> Lookup(std::span<const uint64_t> values, std::span<const int64_t> lengths,
                              store::LookupMode mode, std::span<const float> weights = {});
  // `gradients`: [batch_size, num_columns]. Applies the optimizer once to each row of the batch.
  // kFailedPrecondition: the batch has been updated already.
  // A NaN or infinite gradient of a row leaves that row as it is, and is counted. A batch that
  // fails the check of its size may be passed again.
  StatusOr<store::UpdateReport> Update(BagBatch& batch, std::span<const float> gradients);

  // Of whole slots, by their position. `rows`: [ids.size(), dim]; an ID is one of the slot's
  // values.
  Status SetRows(uint32_t slot, std::span<const uint64_t> ids, std::span<const float> rows);

  store::StoreStats stats() const { return store_->stats(); }
  // See EmbeddingStore.
  Status NumUpdates(std::span<const uint64_t> signs, std::span<uint32_t> counts) const {
    return store_->NumUpdates(signs, counts);
  }
  // For snapshots and loading.
  store::EmbeddingStore& embedding_store() { return *store_; }
  // Batches in flight find no rows when they are updated, which is no error.
  void Clear() { store_->Clear(); }

 private:
  EmbeddingBags(const EmbeddingBagsOptions& options, worker::SlotTable slots,
                std::unique_ptr<store::EmbeddingStore> store);

  using Unit = WorkRun;  // the groups that one thread handles

  // Into inputs_, by group.
  Status Divide(std::span<const uint64_t> values, std::span<const int64_t> lengths,
                std::span<const float> weights);
  // Takes the slot's IDs, and their weights if there are any, from the front of those left.
  Status DivideSlot(uint32_t slot, std::span<const uint64_t>* values,
                    std::span<const float>* weights, std::span<const int64_t> lengths);
  // How many runs of groups a batch is divided into.
  size_t NumUnits() const;
  // Into units_, for the next batch.
  void DivideGroups(const BagBatch& batch);
  // Numbers the IDs of groups and finds their rows. False: some have none.
  bool PlanRun(WorkRun run, const store::InPlaceRows& store, BagBatch* batch) const;
  // body(i) for each i below `count`, on all threads or on this one.
  void For(bool uses_threads, size_t count, const std::function<void(size_t)>& body);
  static std::span<const GroupBatch> GroupsOf(const BagBatch& batch, Unit unit);
  void Pool(const BagBatch& batch, Unit unit, float* out) const;
  // Of inputs_, for inference.
  void PoolUnnumbered(const store::InPlaceRows& store, Unit unit, float* out);
  // Of all groups at once, shard by shard: a shard is changed by one thread.
  Status InsertMissing(BagBatch* batch, store::InPlaceRows* rows);

  const worker::SlotTable slots_;
  std::vector<const worker::SlotConfig*> slots_by_position_;
  std::vector<uint32_t> group_of_;  // by position
  size_t num_groups_ = 0;
  size_t num_columns_ = 0;
  std::vector<float> zeros_;  // as many as the greatest dim
  const std::unique_ptr<store::EmbeddingStore> store_;
  const store::RowFormat format_;
  const std::shared_ptr<BatchShelf> shelf_ = std::make_shared<BatchShelf>();

  // Held for a whole lookup or update: the threads of the pool work for one batch at a time, and
  // results then depend on the order of the calls alone.
  std::mutex mutex_;  // of all that follows: one batch at a time
  ThreadPool threads_;
  std::vector<Unit> units_;
  std::vector<SlotInputs> inputs_;                       // by group
  std::vector<store::RecentRows> recent_;                // by group
  std::vector<std::vector<store::MissingRow>> missing_;  // by shard
};

}  // namespace persia::client

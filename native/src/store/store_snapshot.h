// StoreSnapshot: all rows of a store as they were between two calls, read while training goes on.
//
// The snapshot point lies between calls: what one Update() or SetRows() changed is wholly in it or
// not at all, in all shards. Rows that change after it are copied first, by the thread that changes
// them (shard_snapshot.h); what is not changed is copied by the reader. Costs nothing but a branch
// a row while there is none.
//
// Of changes, the rows are those that were changed, made or removed since the ones before were
// taken. Until they are committed nothing is certain to be written: without, they return to the
// store when this ends, and are among the next.
//
// Memory: the copies that wait to be read are bounded (snapshot_budget.h). At the limit training
// waits for the reader, for `patience` at most; then the snapshot fails, and training goes on.
//
// Read() may be called by several threads at once, each with shards of its own. Locks: the store's,
// then the shard's, then the snapshot's own. Must not outlive its store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "store/embedding_store.h"
#include "store/row_records.h"
#include "store/shard_set.h"
#include "store/shard_snapshot.h"

namespace persia::store {

class StoreSnapshot {
 public:
  struct Options {
    // Of rows that were changed since and wait to be read; see snapshot_budget.h.
    uint64_t max_waiting_bytes = uint64_t{256} << 20;
    // How long a training call waits for room before the snapshot is given up.
    std::chrono::milliseconds patience{10'000};
    // Of changes: how many the store remembers from now on; 0: as many as before.
    uint64_t max_next_changes = 0;
  };

  // Waits until the calls in progress have ended; those that come later wait for the snapshot
  // point, some microseconds. kFailedPrecondition: there is another snapshot, or rows are being
  // loaded.
  static StatusOr<std::unique_ptr<StoreSnapshot>> Begin(EmbeddingStore& store,
                                                        const Options& options);
  // The rows that have changed, see EmbeddingStore::TrackChanges. kFailedPrecondition as well:
  // changes are not tracked. kResourceExhausted: more of them than the store remembers, and a full
  // snapshot is needed; changes are tracked anew from this call on.
  static StatusOr<std::unique_ptr<StoreSnapshot>> TakeChanges(EmbeddingStore& store,
                                                              const Options& options);
  ~StoreSnapshot();  // as End()

  uint64_t step() const { return step_; }          // Update() calls that the store had finished
  uint64_t num_rows() const { return num_rows_; }  // of changes: removals as well
  bool is_of_changes() const { return changes_ != nullptr; }
  // All rows went since the changes before: whoever has older ones drops them first.
  bool is_from_nothing() const { return is_of_changes() && changes_->was_cleared(); }
  const std::optional<TrainConfig>& config() const { return config_; }
  uint32_t num_shards() const { return static_cast<uint32_t>(shards_.size()); }
  bool has_tier() const { return store_.tier() != nullptr; }  // cold rows are read from there

  // What one call reads. To be used again, so that no memory is asked for. `saved` is the
  // snapshot's memory: it goes back by Release(), or training runs out of room.
  struct Batch {
    RowRecords read;                // at most `max_rows`
    std::vector<RowRecords> saved;  // those that were saved before they changed
  };

  // Reads the next rows of an internal shard, in place of what *batch has, which holds the shard's
  // mutex while at most `max_rows` are copied. False when these were the last. An error means that
  // rows are missing, and that of this snapshot nothing may be used. kResourceExhausted: training
  // was held up too long; kFailedPrecondition: after End(), or the rows were cleared in their tier.
  StatusOr<bool> Read(uint32_t shard, size_t max_rows, Batch* batch);
  // Takes back rows that were saved: training has room for others. Read() does so, too, with what
  // *batch has.
  void Release(std::vector<RowRecords>* saved) { budget().Release(saved); }
  // Adds rows that were saved in another shard, so that they do not wait until it is its turn.
  void TakeSaved(uint32_t shard, Batch* batch) { shards_[shard]->TakeSaved(&batch->saved); }

  // Of the store, since the cut.
  uint64_t num_updates() const { return store_.features().num_updates - step_; }
  // Training would soon have to wait until saved rows are read and given back.
  bool NeedsRoom() const { return budget().is_nearly_full(); }

  // The changes have been written: they are not among the next. To be called before End().
  void Commit() { is_committed_ = true; }

  // Changed rows are not saved any more, and calls that wait for room go on. Waits for the calls in
  // progress, as Begin(). May be called twice. The memory goes when the object does.
  void End();

 private:
  explicit StoreSnapshot(ShardSet* store) : store_(*store) {}
  void Cut(const Options& options);
  SnapshotBudget& budget() const { return store_.features().snapshot_budget; }

  ShardSet& store_;
  uint64_t step_ = 0;
  uint64_t num_rows_ = 0;
  std::optional<TrainConfig> config_;
  std::unique_ptr<ChangeSet> changes_;  // null: all rows
  std::atomic<bool> is_committed_ = false;
  bool has_ended_ = false;  // guarded by the store's mutex
  std::vector<std::unique_ptr<ShardSnapshot>> shards_;
};

}  // namespace persia::store

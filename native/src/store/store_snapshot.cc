#include "store/store_snapshot.h"

#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

namespace persia::store {

StatusOr<std::unique_ptr<StoreSnapshot>> StoreSnapshot::Begin(EmbeddingStore& store,
                                                              const Options& options) {
  ShardSet& shards = store.shards();
  PERSIA_RETURN_IF_ERROR(shards.features().Occupy("a snapshot"));
  std::unique_ptr<StoreSnapshot> snapshot(new StoreSnapshot(&shards));
  const std::unique_lock lock(shards.mutex());
  for (const Shard& shard : shards.all()) snapshot->num_rows_ += shard.table().index().size();
  snapshot->Cut(options);
  return snapshot;
}

// Memory is asked for before and keys are sorted after the moment that everyone waits for.
StatusOr<std::unique_ptr<StoreSnapshot>> StoreSnapshot::TakeChanges(EmbeddingStore& store,
                                                                    const Options& options) {
  ShardSet& shards = store.shards();
  PERSIA_RETURN_IF_ERROR(shards.features().Occupy("taking of changes"));
  std::unique_ptr<StoreSnapshot> snapshot(new StoreSnapshot(&shards));
  const uint64_t max_rows = store.change_status().max_rows;
  if (max_rows == 0) {
    return FailedPrecondition("changes of this store are not tracked; call TrackChanges first");
  }
  // Allocated before the lock is taken, and as large as the one that it replaces, unless told
  // otherwise.
  auto next = std::make_unique<ChangeSet>(options.max_next_changes == 0 ? max_rows
                                                                        : options.max_next_changes);
  {
    const std::unique_lock lock(shards.mutex());
    auto changes = shards.ReplaceChanges(std::move(next));
    if (changes->has_overflowed()) {
      return ResourceExhausted("more than ", max_rows,
                               " rows changed since changes were last taken, and it is not known "
                               "which; take a full snapshot, which the next changes follow");
    }
    snapshot->num_rows_ = changes->size();
    snapshot->changes_ = std::move(changes);
    snapshot->Cut(options);
  }
  auto keys = snapshot->changes_->KeysByShard(snapshot->num_shards());
  for (uint32_t i = 0; i < snapshot->num_shards(); ++i) {
    snapshot->shards_[i]->SetChangedKeys(std::move(keys[i]));
  }
  return snapshot;
}

// The caller has the store for himself.
void StoreSnapshot::Cut(const Options& options) {
  budget().Begin(options.max_waiting_bytes, options.patience, store_.count());
  step_ = store_.features().num_updates;
  config_ = store_.config();
  const pool::RowPool* pool = store_.tier() == nullptr ? nullptr : &store_.tier()->pool();
  // A pointer for each shard is all that a snapshot point costs: no row is touched.
  for (Shard& shard : store_.all()) {
    shards_.push_back(
        std::make_unique<ShardSnapshot>(shard.table().now(), &budget(), changes_.get(), pool));
    shard.features().snapshot = shards_.back().get();
  }
}

StoreSnapshot::~StoreSnapshot() { End(); }

StatusOr<bool> StoreSnapshot::Read(uint32_t shard_number, size_t max_rows, Batch* batch) {
  ShardSnapshot& snapshot = *shards_[shard_number];
  Release(&batch->saved);
  batch->read.Clear();
  bool has_more = false;
  {
    const std::shared_lock lock(store_.mutex());
    if (has_ended_) return FailedPrecondition("the snapshot was closed; begin another");
    Shard& shard = store_.all()[shard_number];
    const std::lock_guard shard_lock(shard.mutex());
    has_more = snapshot.Read(shard.table().index(), shard.table().slabs(), max_rows, &batch->read);
  }
  snapshot.TakeSaved(&batch->saved);
  // Last: rows that were not saved are missing in what was read, too.
  if (budget().has_failed()) return budget().FailedStatus();
  return has_more;
}

// Exclusive: no thread is saving a row, so the shards' snapshots may be destroyed after this.
void StoreSnapshot::End() {
  const std::unique_lock lock(store_.mutex());
  if (has_ended_) return;
  has_ended_ = true;
  for (Shard& shard : store_.all()) shard.features().snapshot = nullptr;
  if (changes_ != nullptr && !is_committed_) store_.features().changes->AddAll(*changes_);
  budget().End();
  store_.features().Release();
}

}  // namespace persia::store

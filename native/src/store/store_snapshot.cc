#include "store/store_snapshot.h"

#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "store/change_set.h"
#include "store/shard_snapshot.h"
#include "store/store_impl.h"

namespace persia::store {

StatusOr<std::unique_ptr<StoreSnapshot>> StoreSnapshot::Begin(EmbeddingStore& store,
                                                              const Options& options) {
  EmbeddingStore::Impl& impl = *store.impl_;
  PERSIA_RETURN_IF_ERROR(impl.Occupy("a snapshot"));
  std::unique_ptr<StoreSnapshot> snapshot(new StoreSnapshot(impl));
  const std::unique_lock lock(impl.in_place_mutex());
  for (const Shard& shard : impl.shards()) snapshot->num_rows_ += shard.table().size();
  snapshot->Cut(options);
  return snapshot;
}

// Memory is asked for before and keys are sorted after the moment that everyone waits for.
StatusOr<std::unique_ptr<StoreSnapshot>> StoreSnapshot::TakeChanges(EmbeddingStore& store,
                                                                    const Options& options) {
  EmbeddingStore::Impl& impl = *store.impl_;
  PERSIA_RETURN_IF_ERROR(impl.Occupy("taking of changes"));
  std::unique_ptr<StoreSnapshot> snapshot(new StoreSnapshot(impl));
  const uint64_t max_rows = store.change_status().max_rows;
  if (max_rows == 0) {
    return FailedPrecondition("changes of this store are not tracked; call TrackChanges first");
  }
  auto next = std::make_unique<ChangeSet>(max_rows);
  {
    const std::unique_lock lock(impl.in_place_mutex());
    auto changes = impl.ReplaceChanges(std::move(next));
    if (changes->has_overflowed()) {
      return ResourceExhausted("more than " + std::to_string(max_rows) +
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
  store_.snapshot_budget().Begin(options.max_waiting_bytes, options.patience,
                                 store_.shards().size());
  step_ = store_.num_updates();
  config_ = store_.config();
  for (Shard& shard : store_.shards()) {
    shards_.push_back(std::make_unique<ShardSnapshot>(
        shard.table().now(), &store_.snapshot_budget(), changes_.get(), store_.pool()));
    shard.features().snapshot = shards_.back().get();
  }
}

StoreSnapshot::StoreSnapshot(EmbeddingStore::Impl& store) : store_(store) {}

StoreSnapshot::~StoreSnapshot() { End(); }

uint32_t StoreSnapshot::num_shards() const { return static_cast<uint32_t>(shards_.size()); }

bool StoreSnapshot::has_pool() const { return store_.pool() != nullptr; }

StatusOr<bool> StoreSnapshot::Read(uint32_t shard_number, size_t max_rows, Batch* batch) {
  ShardSnapshot& snapshot = *shards_[shard_number];
  Release(&batch->saved);
  batch->read.Clear();
  bool has_more = false;
  {
    const std::shared_lock in_store(store_.in_place_mutex());
    if (has_ended_) return FailedPrecondition("the snapshot was closed; begin another");
    Shard& shard = store_.shards()[shard_number];
    const std::lock_guard lock(shard.mutex());
    has_more = snapshot.Read(shard.table().index(), shard.table().slabs(), max_rows, &batch->read);
  }
  snapshot.TakeSaved(&batch->saved);
  // Last: rows that were not saved are missing in what was read, too.
  if (store_.snapshot_budget().has_failed()) return store_.snapshot_budget().FailedStatus();
  return has_more;
}

void StoreSnapshot::Release(std::vector<RowRecords>* saved) {
  store_.snapshot_budget().Release(saved);
}

void StoreSnapshot::TakeSaved(uint32_t shard, Batch* batch) {
  shards_[shard]->TakeSaved(&batch->saved);
}

uint64_t StoreSnapshot::num_updates() const { return store_.num_updates() - step_; }

bool StoreSnapshot::NeedsRoom() const { return store_.snapshot_budget().is_nearly_full(); }

void StoreSnapshot::End() {
  const std::unique_lock lock(store_.in_place_mutex());
  if (has_ended_) return;
  has_ended_ = true;
  for (Shard& shard : store_.shards()) shard.features().snapshot = nullptr;
  if (changes_ != nullptr && !is_committed_) store_.changes()->AddAll(*changes_);
  store_.snapshot_budget().End();
  store_.Release();
}

}  // namespace persia::store

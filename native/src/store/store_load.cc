#include "store/store_load.h"

#include <mutex>
#include <shared_mutex>

#include "store/row_policies.h"
#include "store/store_impl.h"

namespace persia::store {

StatusOr<std::unique_ptr<StoreLoad>> StoreLoad::Begin(EmbeddingStore& store) {
  PERSIA_RETURN_IF_ERROR(store.impl_->Occupy("a loading"));
  return std::unique_ptr<StoreLoad>(new StoreLoad(*store.impl_));
}

StoreLoad::StoreLoad(EmbeddingStore::Impl& store) : store_(store) {
  const std::shared_lock in_store(store_.in_place_mutex());
  for (Shard& shard : store_.shards()) shard.BeginLoad();
}

StoreLoad::~StoreLoad() {
  Finish();
  store_.Release();
}

Status StoreLoad::Check(const TrainConfig& config) const {
  PERSIA_RETURN_IF_ERROR(config.Validate());
  return store_.CheckCapacities(RowPolicies(config));
}

// What can be refused is refused while the rows are still there. A training lookup in between would
// insert rows under the old policies.
Status StoreLoad::Replace(const TrainConfig& config) {
  PERSIA_RETURN_IF_ERROR(Check(config));
  const std::unique_lock lock(store_.in_place_mutex());
  PERSIA_RETURN_IF_ERROR(store_.ClearRows());
  return store_.ConfigureAlone(config, /*replace=*/true);
}

void StoreLoad::Reserve(uint64_t num_rows) {
  const std::shared_lock in_store(store_.in_place_mutex());
  ReserveInStore(num_rows);
}

// Signs are spread over the shards as by chance: one gets some more than its part.
void StoreLoad::ReserveInStore(uint64_t num_rows) {
  const uint64_t part = num_rows / store_.shards().size();
  for (Shard& shard : store_.shards()) shard.Reserve(part + part / 64);
}

Status StoreLoad::Add(const LoadedRows& rows) {
  if (!store_.IsConfigured()) {
    return FailedPrecondition("rows were loaded before Configure; replace the rows first");
  }
  PERSIA_RETURN_IF_ERROR(store_.CheckTier());
  const std::shared_lock in_store(store_.in_place_mutex());
  return AddInStore(rows);
}

Status StoreLoad::AddInStore(const LoadedRows& rows) {
  const RowBlock block = {rows.dim, rows.signs};
  return store_.ForEachShard({&block, 1}, [&](Shard& shard, std::span<const Run> runs) {
    LookupReport counts;
    const Status status = shard.Load(runs, rows, &counts);
    num_evicted_ += counts.num_evicted;
    return status;
  });
}

Status StoreLoad::Apply(const Changes& changes) {
  if (!store_.IsConfigured()) {
    return FailedPrecondition("changes were applied before Configure; load a checkpoint first");
  }
  const std::unique_lock lock(store_.in_place_mutex());
  if (changes.from_nothing) {
    PERSIA_RETURN_IF_ERROR(store_.ClearRows());
    uint64_t num_rows = 0;
    for (const LoadedRows& rows : changes.rows) num_rows += rows.signs.size();
    ReserveInStore(num_rows);
  }
  for (const std::span<const uint64_t> signs : changes.removals) {
    const RowBlock block = {1, signs};  // of any dim
    PERSIA_RETURN_IF_ERROR(store_.ForEachShard(
        {&block, 1},
        [](Shard& shard, std::span<const Run> runs) { return shard.RemoveRows(runs); }));
  }
  for (const LoadedRows& rows : changes.rows) PERSIA_RETURN_IF_ERROR(AddInStore(rows));
  return Status::Ok();
}

void StoreLoad::Finish() {
  const std::shared_lock in_store(store_.in_place_mutex());
  for (Shard& shard : store_.shards()) {
    LookupReport counts;
    static_cast<void>(shard.FinishLoad(&counts));
    num_evicted_ += counts.num_evicted;
  }
}

uint64_t StoreLoad::num_evicted() const { return num_evicted_.load(); }

}  // namespace persia::store

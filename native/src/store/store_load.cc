#include "store/store_load.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "store/probe_in_blocks.h"

namespace persia::store {
namespace {

constexpr size_t kTouchedAtATime = 256;

// The state was checked by the caller to be of this policy.
void LoadState(const RowPolicy& policy, const LoadedRows& rows, uint32_t number,
               const RowView& row) {
  if (rows.state == nullptr) return policy.InitializeState(row);
  const size_t state_floats = policy.ShapeFor(row.dim).state_floats;
  std::memcpy(row.state, rows.state + number * state_floats, state_floats * sizeof(float));
  if (row.scalar != nullptr) *row.scalar = rows.scalars[number];
}

// The cell of the key's row, new or old, with the stamp of its age. Its values are the caller's to
// write.
StatusOr<uint32_t> CellFor(Shard* shard, uint64_t key, uint32_t dim, uint32_t age,
                           ChangeBatch* changed, LookupReport* counts) {
  ShardTable& table = shard->table();
  RowCache* cache = shard->cache();
  // Older than the shard's own past: the oldest there is.
  const uint32_t stamp = table.now() - std::min(table.now(), age);
  Status status;
  SignIndex::Entry* entry = table.index().Find(key);
  if (cache != nullptr && entry != nullptr && cache->IsColdOfDim(*entry, dim)) {
    PERSIA_RETURN_IF_ERROR(cache->Promote(entry));
  }
  entry = RemoveOfAnotherDim(&table, key, dim, &status);
  if (!status.ok()) return status;
  if (entry == nullptr) {
    if (cache != nullptr) PERSIA_RETURN_IF_ERROR(cache->CheckFits(key, dim));
    const uint32_t cell = table.Allocate(key, dim, stamp);
    if (cell == ShardTable::kNoCell) return OutOfMemory(table);
    ++counts->num_inserted;
    return cell;
  }
  RowFeatures& features = shard->features();
  features.BeforeTouch(*entry, table.slabs());
  if (!features.BeforeChange(*entry, &status)) return status;
  table.index().SetStamp(entry, stamp);
  changed->Add(key);
  return entry->cell;
}

// May leave a quarter more rows than the capacity: which rows stay must not depend on the order in
// which they are loaded, and sorting out the oldest costs a pass over the index.
Status LoadRows(Shard* shard, std::span<const Run> runs, const LoadedRows& rows,
                LookupReport* counts) {
  const std::lock_guard lock(shard->mutex());
  ShardTable& table = shard->table();
  RowFeatures& features = shard->features();
  // The order does not know that rows older than its own are inserted. The cache's order may stay:
  // which rows are demoted while loading makes no difference, and it takes a pass over the index.
  table.victims().Clear();
  features.limits.ForgetVictims();
  ChangeBatch changed(features.changes);
  for (const Run& run : runs) {
    for (size_t i = 0; i < run.refs.size(); ++i) {
      if (i % kTouchedAtATime == 0) {  // their places in the index, all misses at once
        const size_t end = std::min(i + kTouchedAtATime, run.refs.size());
        for (size_t j = i; j < end; ++j) Touch(table.index().HomeOf(run.refs[j].key));
      }
      const RowRef& ref = run.refs[i];
      PERSIA_ASSIGN_OR_RETURN(const uint32_t cell, CellFor(shard, ref.key, run.dim,
                                                           rows.ages[ref.row], &changed, counts));
      const RowView row = table.slabs().View(cell);
      shard->format().Write(row.values, rows.embeddings + size_t{ref.row} * run.dim, run.dim);
      LoadState(table.policies()->OfKey(ref.key), rows, ref.row, row);
      features.BeginCount(cell, table.slabs());
    }
  }
  if (table.index().size() > table.capacity() + table.capacity() / 4) {
    PERSIA_RETURN_IF_ERROR(shard->Trim(counts));
  }
  return shard->cache() == nullptr ? Status::Ok() : shard->cache()->DemoteLoaded(runs);
}

// Rows of the runs' keys, of any dim.
// Orders of eviction would lead to keys that are gone, or made anew with the same stamp.
Status RemoveRows(Shard* shard, std::span<const Run> runs) {
  const std::lock_guard lock(shard->mutex());
  shard->ForgetVictims();
  for (const Run& run : runs) {
    for (const RowRef& ref : run.refs) {
      SignIndex::Entry* entry = shard->table().index().Find(ref.key);
      if (entry != nullptr) PERSIA_RETURN_IF_ERROR(shard->table().Remove(entry));
    }
  }
  return Status::Ok();
}

}  // namespace

StatusOr<std::unique_ptr<StoreLoad>> StoreLoad::Begin(EmbeddingStore& store) {
  PERSIA_RETURN_IF_ERROR(store.shards().features().Occupy("a loading"));
  return std::unique_ptr<StoreLoad>(new StoreLoad(&store.shards()));
}

// Loaded rows need stamps of the past: the present advances by 2^31 batches, which is also as far
// back as RebaseStamps() remembers.
StoreLoad::StoreLoad(ShardSet* shards) : shards_(*shards) {
  const std::shared_lock lock(shards_.mutex());
  for (Shard& shard : shards_.all()) {
    const std::lock_guard shard_lock(shard.mutex());
    shard.features().expiry.Forget();
    shard.features().ForgetVictims();
    shard.table().MakePast();
  }
}

StoreLoad::~StoreLoad() {
  Finish();
  shards_.features().Release();
}

// Capacities are checked as Configure() would: Replace() must not fail when the rows are gone.
Status StoreLoad::Check(const TrainConfig& config) const {
  PERSIA_RETURN_IF_ERROR(config.Validate());
  return shards_.CheckCapacities(RowPolicies(config));
}

// What can be refused is refused while the rows still exist. Locked as a whole: a training lookup
// in between would insert rows under the old policies.
Status StoreLoad::Replace(const TrainConfig& config) {
  PERSIA_RETURN_IF_ERROR(Check(config));
  const std::unique_lock lock(shards_.mutex());
  PERSIA_RETURN_IF_ERROR(shards_.Clear());
  return shards_.Configure(config, /*replace=*/true);
}

void StoreLoad::Reserve(uint64_t num_rows) {
  const std::shared_lock lock(shards_.mutex());
  ReserveLocked(num_rows);
}

// The hash spreads signs over the shards: some get a little more than their part.
void StoreLoad::ReserveLocked(uint64_t num_rows) {
  const uint64_t part = num_rows / shards_.count();
  for (Shard& shard : shards_.all()) {
    const std::lock_guard lock(shard.mutex());
    shard.table().Reserve(part + part / 64);
  }
}

Status StoreLoad::Add(const LoadedRows& rows) {
  if (!shards_.IsConfigured()) {
    return FailedPrecondition("rows were loaded before Configure; replace the rows first");
  }
  PERSIA_RETURN_IF_ERROR(shards_.CheckTier());
  const std::shared_lock lock(shards_.mutex());
  return AddLocked(rows);
}

// A checkpoint's block is a request of one block.
Status StoreLoad::AddLocked(const LoadedRows& rows) {
  const RowBlock block = {rows.dim, rows.signs};
  const Status status = shards_.ForEach({&block, 1}, [&](Shard& shard, std::span<const Run> runs) {
    LookupReport counts;
    const Status loaded = LoadRows(&shard, runs, rows, &counts);
    num_evicted_ += counts.num_evicted;
    return loaded;
  });
  shards_.NoteReplacement();
  return status;
}

// Exclusive, which also keeps the maintenance thread of a tier out: it sees all of it or nothing.
Status StoreLoad::Apply(const Changes& changes) {
  if (!shards_.IsConfigured()) {
    return FailedPrecondition("changes were applied before Configure; load a checkpoint first");
  }
  const std::unique_lock lock(shards_.mutex());
  if (changes.from_nothing) {
    PERSIA_RETURN_IF_ERROR(shards_.Clear());
    uint64_t num_rows = 0;
    for (const LoadedRows& rows : changes.rows) num_rows += rows.signs.size();
    ReserveLocked(num_rows);
  }
  for (const std::span<const uint64_t> signs : changes.removals) {
    const RowBlock block = {1, signs};  // RemoveRows() ignores the dim
    PERSIA_RETURN_IF_ERROR(shards_.ForEach(
        {&block, 1},
        [](Shard& shard, std::span<const Run> runs) { return RemoveRows(&shard, runs); }));
    shards_.NoteReplacement();
  }
  for (const LoadedRows& rows : changes.rows) PERSIA_RETURN_IF_ERROR(AddLocked(rows));
  return Status::Ok();
}

// Where a tier has no room to trim, later calls evict the rows beyond the capacity.
void StoreLoad::Finish() {
  const std::shared_lock lock(shards_.mutex());
  for (Shard& shard : shards_.all()) {
    const std::lock_guard shard_lock(shard.mutex());
    LookupReport counts;
    static_cast<void>(shard.Trim(&counts));
    num_evicted_ += counts.num_evicted;
  }
}

}  // namespace persia::store

#include "store/shard.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "store/row_policy.h"

namespace persia::store {
namespace {

constexpr uint32_t kNoCell = ShardTable::kNoCell;

// The thread's, so that calls allocate nothing once the largest has been seen. Not a shard's: other
// calls may come in between where the mutex is released.
std::vector<MissingRef>* NoneMissing() {
  thread_local std::vector<MissingRef> missing;
  missing.clear();
  return &missing;
}

}  // namespace

// The table only keeps the address of the features, which are made before it.
Shard::Shard(uint64_t capacity, SlabMemory* slab_memory, SlabMemory* cold_memory,
             double growth_phase, bool counts_updates, RowDtype row_dtype)
    : format_(row_dtype), table_(capacity, slab_memory, cold_memory, growth_phase, &features_) {
  features_.counts_updates = counts_updates;
}

// From now on each new row has a cell behind its state (RowFeatures::tail_floats): so before there
// are any.
void Shard::SetTier(StoreTier* tier, CacheBudget budget, uint64_t num_pinned) {
  const std::lock_guard lock(mutex_);
  cache_ = std::make_unique<RowCache>(&mutex_, &table_, &features_, tier, budget, num_pinned);
  features_.cache = cache_.get();
}

Status Shard::Lookup(std::span<const Run> runs, LookupMode mode, float* rows, LookupReport* report,
                     FoundCells* found) {
  Lock lock(mutex_);
  LookupReport counts;
  const uint64_t num_removals = table_.num_removals();
  const Status status = mode == LookupMode::kInference
                            ? LookupForInference(&lock, runs, rows, &counts)
                            : LookupForTraining(&lock, runs, rows, &counts, found);
  // Where it has removed rows, they may be of this lookup.
  if (found != nullptr && status.ok() && counts.num_unadmitted == 0 &&
      table_.num_removals() == num_removals) {
    found->num_removals = num_removals;
  }
  totals_.lookups += counts;
  *report += counts;
  return status;
}

Status Shard::LookupForInference(Lock* lock, std::span<const Run> runs, float* rows,
                                 LookupReport* counts) {
  for (const Run& run : runs) {
    std::vector<MissingRef>* missing = NoneMissing();
    table_.ForEachRow(
        run, format_.EmbeddingFloats(run.dim), [&](const RowRef& ref, const Entry* entry) {
          if (entry == nullptr) return missing->push_back({&run, &ref});
          format_.Read(rows + run.FloatOffset(ref), table_.slabs().values(entry->cell), run.dim);
        });
    if (cache_ != nullptr) {
      cache_->CountHits(run.refs.size() - missing->size(), 0);
      PERSIA_RETURN_IF_ERROR(cache_->Read(lock, missing, rows));
    }
    for (const auto& [_, ref] : *missing) {
      std::memset(rows + run.FloatOffset(*ref), 0, run.dim * sizeof(float));
    }
    counts->num_missing += missing->size();
  }
  return Status::Ok();
}

Status Shard::LookupForTraining(Lock* lock, std::span<const Run> runs, float* rows,
                                LookupReport* counts, FoundCells* found) {
  // The cell, not the entry: inserting moves entries.
  const auto copy = [&](const Run& run, const RowRef& ref, uint32_t cell) {
    if (found != nullptr) found->by_row[ref.row] = cell;
    format_.Read(rows + run.FloatOffset(ref), table_.slabs().values(cell), run.dim);
  };
  std::vector<MissingRef>* missing = NoneMissing();
  BeginBatch();
  PERSIA_RETURN_IF_ERROR(UseExisting(lock, runs, missing, copy));
  counts->num_missing += missing->size();
  // What is refused needs no room.
  std::erase_if(*missing, [&](const MissingRef& each) {
    if (Admit(each.ref->key)) return false;
    ++counts->num_unadmitted;
    std::memset(rows + each.run->FloatOffset(*each.ref), 0, each.run->dim * sizeof(float));
    return true;
  });
  return InsertMissing(*missing, copy, counts);
}

Status Shard::SetRows(std::span<const Run> runs, const float* rows) {
  Lock lock(mutex_);
  LookupReport counts;
  ChangeBatch changed(features_.changes);
  Status change_status;
  const auto set = [&](const Run& run, const RowRef& ref, uint32_t cell) {
    if (!features_.BeforeChange({ref.key, cell, 0}, &change_status)) return;
    changed.Add(ref.key);
    const RowView row = table_.slabs().View(cell);
    format_.Write(row.values, rows + run.FloatOffset(ref), run.dim);
    table_.policies()->OfKey(ref.key).InitializeState(row);
    features_.BeginCount(cell, table_.slabs());
  };
  std::vector<MissingRef>* missing = NoneMissing();
  BeginBatch();
  PERSIA_RETURN_IF_ERROR(UseExisting(&lock, runs, missing, set));
  const Status status = InsertMissing(*missing, set, &counts);
  totals_.lookups += counts;
  return status.ok() ? change_status : status;
}

// A run's rows are usually of one group; where they are not, only the prefetching is off.
size_t Shard::StrideOf(const Run& run) const {
  return table_.ShapeOf(run.refs[0].key, run.dim).Stride();
}

template <typename Use>
Status Shard::UseExisting(Lock* lock, std::span<const Run> runs, MissingRefs* missing, Use use) {
  const uint32_t now = table_.now();
  size_t num_rows = 0;
  for (const Run& run : runs) {
    num_rows += run.refs.size();
    // To be saved for a snapshot, a row is read with its state.
    const size_t row_floats =
        features_.snapshot == nullptr ? format_.EmbeddingFloats(run.dim) : StrideOf(run);
    table_.ForEachRow(run, row_floats, [&](const RowRef& ref, Entry* entry) {
      if (entry == nullptr) return missing->push_back({&run, &ref});
      table_.Touch(entry, now);
      use(run, ref, entry->cell);
    });
  }
  if (cache_ == nullptr) return Status::Ok();
  // From here on the mutex may be released: what was found before is done with.
  const size_t num_not_resident = missing->size();
  cache_->KeepCold(*missing);
  const Status status = cache_->Fetch(
      lock, missing,
      [&](const MissingRef& each, Entry* entry) {
        table_.Touch(entry, table_.now());
        use(*each.run, *each.ref, entry->cell);
      },
      [] {});
  cache_->CountHits(num_rows - num_not_resident, num_not_resident - missing->size());
  return status;
}

template <typename Use>
Status Shard::InsertMissing(const MissingRefs& missing, Use use, LookupReport* counts) {
  Status status;
  thread_local std::vector<uint64_t> keys;
  keys.clear();
  for (const auto& [run, ref] : missing) {
    if (cache_ != nullptr) PERSIA_RETURN_IF_ERROR(cache_->CheckFits(ref->key, run->dim));
    keys.push_back(ref->key);
  }
  // First, so that no other row is evicted for want of the room that these leave.
  for (const auto& [run, ref] : missing) RemoveOfAnotherDim(&table_, ref->key, run->dim, &status);
  if (!status.ok()) return status;
  PERSIA_RETURN_IF_ERROR(MakeRoom(keys, /*keep_batch=*/false, counts).status());
  for (const auto& [run, ref] : missing) {
    // A caller that breaks its promise and names a sign twice gets the same row twice.
    const Entry* entry = RemoveOfAnotherDim(&table_, ref->key, run->dim, &status);
    if (!status.ok()) return status;
    const uint32_t cell = entry != nullptr ? entry->cell : Insert(ref->key, run->dim, counts);
    if (cell == kNoCell) return OutOfMemory(table_);
    use(*run, *ref, cell);
  }
  return cache_ == nullptr ? Status::Ok() : cache_->Limit();
}

bool Shard::Admit(uint64_t key) {
  const uint64_t sign = SignOfKey(key);
  const RowPolicy& policy = table_.policies()->Of(sign);
  if (policy.admit_after() == 1 && policy.Admits(sign)) return true;
  if (table_.index().Find(key) != nullptr) return true;
  return policy.Admits(sign) && features_.sightings.Count(key) >= policy.admit_after();
}

Status Shard::Update(std::span<const Run> runs, const float* gradients, UpdateReport* report,
                     const FoundCells* found) {
  Lock lock(mutex_);
  UpdateReport counts;
  Status status;
  // A snapshot saves rows by their index entries. Without policies there are no rows.
  const bool has_cells = found != nullptr && found->num_removals == table_.num_removals() &&
                         features_.snapshot == nullptr && table_.policies() != nullptr;
  for (const Run& run : runs) {
    has_cells ? UpdateFound(run, found->by_row, gradients, &counts)
              : UpdateRun(&lock, run, gradients, &counts, &status);
  }
  // Once for the call: rows that were promoted may be too many only now.
  if (cache_ != nullptr) status = cache_->EndUpdate(status);
  totals_.updates += counts;
  *report += counts;
  return status;
}

void Shard::UpdateRun(Lock* lock, const Run& run, const float* gradients, UpdateReport* counts,
                      Status* status) {
  const RowPolicies* policies = table_.policies();
  if (policies == nullptr) {  // then there are no rows
    counts->num_missing += run.refs.size();
    return;
  }
  const RowSlabs& slabs = table_.slabs();
  RowSteps steps(run.dim, counts);
  ChangeBatch changed(features_.changes);
  const auto update = [&](const RowRef& ref, const Entry& entry) {
    if (!features_.BeforeUpdate(entry, slabs, status)) return;
    changed.Add(ref.key);
    steps.Add(policies->OfKey(ref.key), slabs.View(entry.cell), gradients + run.FloatOffset(ref));
    if (features_.counts_updates) CountUpdate(slabs.values(entry.cell), slabs.shape(entry.cell));
  };
  std::vector<MissingRef>* missing = NoneMissing();
  table_.ForEachRow(run, StrideOf(run), [&](const RowRef& ref, const Entry* entry) {
    if (entry == nullptr) return missing->push_back({&run, &ref});
    update(ref, *entry);
  });
  steps.Flush();
  if (cache_ != nullptr && !missing->empty() && status->ok()) {
    // Rows that were demoted since their lookup. Steps point to rows, which may move.
    Status fetched = cache_->Fetch(
        lock, missing,
        [&](const MissingRef& each, const Entry* entry) { update(*each.ref, *entry); },
        [&] { steps.Flush(); });
    if (status->ok()) *status = std::move(fetched);
  }
  counts->num_missing += missing->size();
}

// Rows and gradients are asked for ahead: both are far apart, as a request is divided by hash.
void Shard::UpdateFound(const Run& run, std::span<const uint32_t> cells, const float* gradients,
                        UpdateReport* counts) {
  constexpr size_t kAhead = 48, kLineFloats = 16, kMaxFloats = 256;
  const RowPolicies* policies = table_.policies();
  const RowSlabs& slabs = table_.slabs();
  const size_t row_floats = std::min(StrideOf(run), kMaxFloats);
  RowSteps steps(run.dim, counts);
  ChangeBatch changed(features_.changes);
  for (size_t i = 0; i < run.refs.size(); ++i) {
    if (i + kAhead < run.refs.size()) {
      const RowRef& next = run.refs[i + kAhead];
      const float* row = slabs.values(cells[next.row]);
      for (size_t j = 0; j < row_floats; j += kLineFloats) __builtin_prefetch(row + j, 1);
      __builtin_prefetch(gradients + run.FloatOffset(next));
    }
    const RowRef& ref = run.refs[i];
    const uint32_t cell = cells[ref.row];
    changed.Add(ref.key);
    steps.Add(policies->OfKey(ref.key), slabs.View(cell), gradients + run.FloatOffset(ref));
    if (features_.counts_updates) CountUpdate(slabs.values(cell), slabs.shape(cell));
  }
  steps.Flush();
}

// Groups first: evicting a group's rows may leave the room that the shard needs.
StatusOr<Shard::Room> Shard::MakeRoom(std::span<const uint64_t> keys, bool keep_batch,
                                      LookupReport* counts) {
  if (features_.limits.is_on()) {
    for (const uint64_t key : keys) features_.limits.Expect(key);
    PERSIA_ASSIGN_OR_RETURN(const bool has_room, MakeRoomInGroups(keep_batch, counts));
    if (!has_room) return Room::kGroupIsFull;
  }
  PERSIA_ASSIGN_OR_RETURN(const bool has_room,
                          table_.MakeRoom(keys.size(), keep_batch, &counts->num_evicted));
  return has_room ? Room::kEnough : Room::kShardIsFull;
}

// Of the keys that are expected. A row that cannot be removed is the oldest again.
StatusOr<bool> Shard::MakeRoomInGroups(bool keep_batch, LookupReport* counts) {
  GroupLimits& limits = features_.limits;
  Status status;
  bool has_room = !keep_batch || !limits.HasTooMany();
  while (has_room && status.ok()) {
    Entry* victim = limits.NextVictim(table_.index());
    if (victim == nullptr) break;
    has_room = !keep_batch || victim->stamp != table_.now();
    if (!has_room) break;
    status = table_.Remove(victim);
    status.ok() ? static_cast<void>(++counts->num_evicted) : limits.ForgetVictims();
  }
  limits.ExpectNothing();
  if (!status.ok()) return status;
  return has_room;
}

uint32_t Shard::Insert(uint64_t key, uint32_t dim, LookupReport* counts) {
  if (features_.limits.is_on() && !MakeRoom({&key, 1}, /*keep_batch=*/false, counts).ok()) {
    return kNoCell;
  }
  const uint32_t cell = table_.Insert(key, dim, &counts->num_evicted);
  if (cell != kNoCell) ++counts->num_inserted;
  return cell;
}

void Shard::BeginBatch() {
  table_.BeginBatch();
  if (features_.expiry.is_on()) RemoveExpired();
}

void Shard::RemoveExpired() {
  const auto expired = features_.expiry.Step(table_.index(), *table_.policies(), table_.now(),
                                             std::chrono::steady_clock::now());
  for (const uint64_t key : expired) {
    // Where there is no room to remove it, it is due again with the next walk.
    if (table_.Remove(table_.index().Find(key)).ok()) ++totals_.lookups.num_expired;
  }
}

// The order is found before and forgotten after: loaded rows, which may be older than those it
// knows, are in it once.
Status Shard::Trim(LookupReport* counts) {
  ForgetVictims();
  const Status status = MakeRoom({}, /*keep_batch=*/false, counts).status();
  ForgetVictims();
  return status;
}

void Shard::ForgetVictims() {
  table_.victims().Clear();
  features_.ForgetVictims();
}

void Shard::AddStatsTo(StoreStats* stats) const {
  std::lock_guard lock(mutex_);
  stats->num_rows += table_.index().size();
  stats->memory_bytes += sizeof(Shard) + table_.index().memory_bytes() +
                         table_.slabs().memory_bytes() + table_.victims().memory_bytes() +
                         features_.memory_bytes() +
                         (cache_ == nullptr ? 0 : sizeof(RowCache) + cache_->memory_bytes());
  stats->lookups += totals_.lookups;
  stats->updates += totals_.updates;
}

uint64_t Shard::size() const {
  std::lock_guard lock(mutex_);
  return table_.index().size();
}

void Shard::Clear(const std::shared_ptr<RowArrays>& arrays) {
  std::lock_guard lock(mutex_);
  table_.Clear(arrays);
}

void Shard::SetPolicies(std::shared_ptr<const RowPolicies> policies, uint64_t num_filter_cells,
                        const std::shared_ptr<RowArrays>& arrays, uint32_t number,
                        uint32_t num_shards) {
  const std::lock_guard lock(mutex_);
  // Without rows, drop what slabs remember of the former policies' shapes.
  if (table_.index().size() == 0) table_.Clear(arrays);
  // Until the limits know the new policies, they use the old ones.
  const auto old_policies = table_.SetPolicies(std::move(policies));
  features_.limits.SetPolicies(*table_.policies(), table_.index(), number, num_shards);
  // A walk for expired rows begins with the next batch, and is off where no group has a time to
  // live.
  features_.expiry.SetShortest(table_.policies()->ShortestTimeToLive());
  features_.sightings.Resize(num_filter_cells);
}

}  // namespace persia::store

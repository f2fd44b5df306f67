#include "store/shard.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "base/hash.h"

namespace persia::store {
namespace {

constexpr uint32_t kNoSlot = RowSlabs::kNoSlot;
static_assert(kNoSlot == SignIndex::kNone);

// Rows handled together: enough cache misses in flight to
// hide one another, few enough to stay in the L1 cache.
constexpr size_t kGroup = 32;
constexpr size_t kLineBytes = 64;
constexpr size_t kMaxPrefetchBytes = 1024;  // the hardware's own prefetcher follows on long rows

}  // namespace

template <Shard::Access access>
void Shard::PrefetchRow(uint32_t slot, size_t bytes) {
  constexpr int kForWriting = access == Access::kWrite ? 1 : 0;
  const RowView row = slabs_.View(slot);
  const auto* start = reinterpret_cast<const char*>(row.values);
  for (size_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(start + i, kForWriting);
  if (access == Access::kWrite && row.scalar != nullptr) __builtin_prefetch(row.scalar, 1);
}

// Three stages a group, so that no stage waits for the memory the one before
// asked for: the guessed slots' rows, their neighbours in the LRU order, the
// work itself. A guess (the first slot with the sign's tag) is confirmed only
// when its turn comes, because earlier rows of the group may evict and reuse it.
template <Shard::Access access, typename Handle>
bool Shard::ForEachRow(const Run& run, Handle handle) {
  constexpr int kForWriting = access == Access::kTouch ? 1 : 0;
  std::array<uint32_t, kGroup> guesses;
  const std::span<const RowRef> refs = run.refs;
  const bool writes_state = access == Access::kWrite && rules_ != nullptr;
  const size_t floats = writes_state ? rules_->ShapeFor(run.dim).Stride() : run.dim;
  const size_t row_bytes = std::min(floats * sizeof(float), kMaxPrefetchBytes);
  for (const RowRef& ref : refs.first(std::min(kGroup, refs.size()))) index_.Prefetch(ref.tag);
  for (size_t begin = 0; begin < refs.size(); begin += kGroup) {
    const auto group = refs.subspan(begin, std::min(kGroup, refs.size() - begin));
    const auto rest = refs.subspan(begin + group.size());
    for (const RowRef& ref : rest.first(std::min(kGroup, rest.size()))) index_.Prefetch(ref.tag);
    for (size_t i = 0; i < group.size(); ++i) {
      guesses[i] = index_.FindFirst(group[i].tag);
      if (guesses[i] == kNoSlot) continue;
      __builtin_prefetch(&slabs_.meta(guesses[i]), kForWriting);
      PrefetchRow<access>(guesses[i], row_bytes);
    }
    if constexpr (access == Access::kTouch) {
      for (size_t i = 0; i < group.size(); ++i) {
        if (guesses[i] != kNoSlot) lru_.PrefetchNeighbours(guesses[i]);
      }
    }
    for (size_t i = 0; i < group.size(); ++i) {
      const RowRef& ref = group[i];
      const bool confirmed = guesses[i] != kNoSlot && slabs_.Holds(guesses[i], ref.sign);
      if (!handle(ref, confirmed ? guesses[i] : Find(ref))) return false;
    }
  }
  return true;
}

Status Shard::Lookup(std::span<const Run> runs, LookupMode mode, float* rows,
                     LookupReport* report) {
  std::lock_guard lock(mutex_);
  LookupReport counts;
  bool has_memory = true;
  for (const Run& run : runs) {
    if (mode == LookupMode::kInference) {
      LookupForInference(run, rows, &counts);
    } else if (!LookupForTraining(run, rows, &counts)) {
      has_memory = false;
      break;
    }
  }
  Add(counts, &lookups_);
  Add(counts, report);
  return has_memory ? Status::Ok() : OutOfMemory();
}

void Shard::LookupForInference(const Run& run, float* rows, LookupReport* counts) {
  const uint32_t pool = slabs_.FindPool(run.dim);
  const size_t bytes = run.dim * sizeof(float);
  ForEachRow<Access::kRead>(run, [&](const RowRef& ref, uint32_t slot) {
    float* out = rows + run.FloatOffset(ref);
    if (slot != kNoSlot && slabs_.pool(slot) == pool) {
      std::memcpy(out, slabs_.values(slot), bytes);
    } else {
      std::memset(out, 0, bytes);
      ++counts->num_missing;
    }
    return true;
  });
}

bool Shard::LookupForTraining(const Run& run, float* rows, LookupReport* counts) {
  const uint32_t pool = slabs_.FindOrAddPool(rules_->ShapeFor(run.dim));
  const size_t bytes = run.dim * sizeof(float);
  return ForEachRow<Access::kTouch>(run, [&](const RowRef& ref, uint32_t slot) {
    float* out = rows + run.FloatOffset(ref);
    if (slot != kNoSlot && slabs_.pool(slot) == pool) {
      lru_.MakeNewest(slot);
      std::memcpy(out, slabs_.values(slot), bytes);
      return true;
    }
    ++counts->num_missing;
    // A row of another dim was admitted before; it is only made anew.
    if (slot == kNoSlot && !rules_->Admits(ref.sign)) {
      ++counts->num_unadmitted;
      std::memset(out, 0, bytes);
      return true;
    }
    if (slot != kNoSlot) Remove(slot);
    const uint32_t inserted = Insert(ref, pool, counts);
    if (inserted == kNoSlot) return false;
    rules_->Initialize(ref.sign, slabs_.View(inserted));
    std::memcpy(out, slabs_.values(inserted), bytes);
    return true;
  });
}

void Shard::Update(std::span<const Run> runs, const float* gradients, UpdateReport* report) {
  std::lock_guard lock(mutex_);
  UpdateReport counts;
  for (const Run& run : runs) {
    const uint32_t pool = slabs_.FindPool(run.dim);
    ForEachRow<Access::kWrite>(run, [&](const RowRef& ref, uint32_t slot) {
      if (slot == kNoSlot || slabs_.pool(slot) != pool) {
        ++counts.num_missing;
        return true;
      }
      rules_->ApplyGradient(slabs_.View(slot), gradients + run.FloatOffset(ref));
      ++counts.num_updated;
      return true;
    });
  }
  Add(counts, &updates_);
  Add(counts, report);
}

Status Shard::SetRows(std::span<const Run> runs, const float* rows) {
  std::lock_guard lock(mutex_);
  LookupReport counts;
  bool has_memory = true;
  for (const Run& run : runs) {
    has_memory = SetRun(run, rows, &counts);
    if (!has_memory) break;
  }
  Add(counts, &lookups_);
  return has_memory ? Status::Ok() : OutOfMemory();
}

bool Shard::SetRun(const Run& run, const float* rows, LookupReport* counts) {
  const uint32_t pool = slabs_.FindOrAddPool(rules_->ShapeFor(run.dim));
  return ForEachRow<Access::kTouch>(run, [&](const RowRef& ref, uint32_t slot) {
    if (slot != kNoSlot && slabs_.pool(slot) == pool) {
      lru_.MakeNewest(slot);
    } else {
      if (slot != kNoSlot) Remove(slot);
      slot = Insert(ref, pool, counts);
      if (slot == kNoSlot) return false;
    }
    const RowView row = slabs_.View(slot);
    std::memcpy(row.values, rows + run.FloatOffset(ref), run.dim * sizeof(float));
    rules_->InitializeState(row);
    return true;
  });
}

uint32_t Shard::Find(const RowRef& ref) {
  return index_.Find(ref.tag, [&](uint32_t slot) { return slabs_.Holds(slot, ref.sign); });
}

uint32_t Shard::Insert(const RowRef& ref, uint32_t pool, LookupReport* counts) {
  if (index_.size() >= capacity_) {
    Remove(lru_.oldest());
    ++counts->num_evicted;
  }
  const uint32_t slot = slabs_.Allocate(pool, ref.sign);
  if (slot == kNoSlot) return kNoSlot;
  if (!index_.Insert(ref.tag, slot)) {
    slabs_.Free(slot);
    return kNoSlot;
  }
  lru_.AddNewest(slot);
  ++counts->num_inserted;
  return slot;
}

void Shard::Remove(uint32_t slot) {
  lru_.Remove(slot);
  index_.Erase(static_cast<uint32_t>(SignHash(slabs_.meta(slot).sign)), slot);
  slabs_.Free(slot);
}

Status Shard::OutOfMemory() const {
  return ResourceExhausted("no memory for another row beside the " + std::to_string(index_.size()) +
                           " in this shard (" + std::to_string(slabs_.memory_bytes()) +
                           " bytes); lower the capacity or add parameter servers");
}

void Shard::AddStatsTo(StoreStats* stats) const {
  std::lock_guard lock(mutex_);
  stats->num_rows += index_.size();
  stats->memory_bytes += sizeof(Shard) + index_.memory_bytes() + slabs_.memory_bytes();
  Add(lookups_, &stats->lookups);
  Add(updates_, &stats->updates);
}

uint64_t Shard::size() const {
  std::lock_guard lock(mutex_);
  return index_.size();
}

void Shard::Clear() {
  std::lock_guard lock(mutex_);
  ClearLocked();
}

void Shard::ClearLocked() {
  index_.Clear();
  slabs_.Clear();
  lru_.Clear();
}

void Shard::SetRulesLocked(std::shared_ptr<const RowRules> rules) {
  // Without rows, drop what pools remember of the former rules' shapes.
  if (IsEmptyLocked()) ClearLocked();
  rules_ = std::move(rules);
}

void Add(const LookupReport& counts, LookupReport* total) {
  total->num_missing += counts.num_missing;
  total->num_inserted += counts.num_inserted;
  total->num_unadmitted += counts.num_unadmitted;
  total->num_evicted += counts.num_evicted;
}

void Add(const UpdateReport& counts, UpdateReport* total) {
  total->num_updated += counts.num_updated;
  total->num_missing += counts.num_missing;
}

}  // namespace persia::store

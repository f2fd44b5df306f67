// The part of Shard that moves rows between the cache and the pool; see tier.h.
#include <algorithm>
#include <array>

#include "store/shard.h"
#include "store/tier.h"
#include "store/tier_cells.h"

namespace persia::store {
namespace {

constexpr size_t kRowsAtATime = 64;

}  // namespace

void Shard::SetTier(Tier* tier, uint64_t cache_rows) {
  const std::lock_guard lock(mutex_);
  tier_ = tier;
  cache_rows_ = cache_rows;
  coldest_ =
      VictimQueue([this](const SignIndex::Entry& entry) { return !IsCold(slabs_, entry.slot); });
}

Status Shard::AddRecovered(const pool::RecoveredRow& row) {
  const std::lock_guard lock(mutex_);
  const uint64_t key = SignKey(row.head.sign);
  const uint32_t slot = slabs_.Allocate(slabs_.FindOrAddPool(kColdShape));
  if (slot == RowSlabs::kNoSlot) return OutOfMemory();
  // The stamp is the end of the version until FinishRecovery() knows how old that is.
  if (!index_.Insert({key, slot, static_cast<uint32_t>(row.head.version)})) return OutOfMemory();
  SetCell(slabs_, slot, ColdCell{row.address, row.head.dim, row.head.state_floats});
  limits_.CountInsert(key);
  return Status::Ok();
}

void Shard::FinishRecovery(uint64_t committed) {
  const std::lock_guard lock(mutex_);
  const auto last = static_cast<uint32_t>(committed);
  now_ = kStampRebase;
  index_.ForEach(
      [&](SignIndex::Entry& entry) { entry.stamp = now_ - std::min(now_, last - entry.stamp); });
  LookupReport counts;
  Trim(&counts);
}

RowShape Shard::ShapeOf(uint64_t key, uint32_t dim) const {
  RowShape shape = rules_->OfKey(key).ShapeFor(dim);
  if (tier_ != nullptr) {
    shape.tail_floats = kCellFloats;
  } else if (counts_updates_) {
    shape.tail_floats = kUpdateCountFloats;
  }
  return shape;
}

bool Shard::IsColdOfDim(const SignIndex::Entry& entry, uint32_t dim) const {
  return tier_ != nullptr && IsCold(slabs_, entry.slot) &&
         ColdCellOf(slabs_, entry.slot).dim == dim;
}

Status Shard::CopyCold(const SignIndex::Entry& entry, uint32_t dim, float* out) const {
  thread_local std::vector<float> values;
  pool::RowHead head;
  PERSIA_RETURN_IF_ERROR(ReadCold(tier_->pool(), entry, slabs_, &head, &values));
  std::copy_n(values.begin(), dim, out);
  return Status::Ok();
}

Status Shard::Promote(SignIndex::Entry* entry) {
  const ColdCell cell = ColdCellOf(slabs_, entry->slot);
  const RowShape shape = ShapeOf(entry->key, cell.dim);
  const uint32_t slot = slabs_.Allocate(slabs_.FindOrAddPool(shape));
  if (slot == RowSlabs::kNoSlot) return OutOfMemory();
  pool::RowHead head;
  const Status status =
      tier_->pool().Read(cell.address, SignOfKey(entry->key), &head,
                         std::span(slabs_.values(slot), size_t{cell.dim} + cell.state_floats));
  if (!status.ok()) {
    slabs_.Free(slot);
    return status;
  }
  if (shape.has_scalar) *slabs_.scalar(slot) = head.scalar;
  SetCell(slabs_, slot, HotCell{cell.address, 0});
  slabs_.Free(entry->slot);
  entry->slot = slot;
  ++num_hot_;
  ++num_promoted_;
  return Status::Ok();
}

Status Shard::WriteBack(std::span<SignIndex::Entry* const> entries) {
  std::vector<pool::RowWrite> writes;
  for (const SignIndex::Entry* entry : entries) {
    const RowShape& shape = slabs_.shape(entry->slot);
    const HotCell cell = HotCellOf(slabs_, entry->slot);
    writes.push_back({.head = {.sign = SignOfKey(entry->key),
                               .version = cell.unsaved,
                               .dim = shape.dim,
                               .state_floats = shape.state_floats,
                               .scalar = shape.has_scalar ? *slabs_.scalar(entry->slot) : 0,
                               .has_scalar = shape.has_scalar ? 1u : 0u},
                      .values = slabs_.values(entry->slot),
                      .replaces = cell.address});
  }
  std::vector<uint64_t> addresses(writes.size());
  PERSIA_RETURN_IF_ERROR(tier_->pool().Write(writes, addresses));
  for (size_t i = 0; i < entries.size(); ++i) {
    SetCell(slabs_, entries[i]->slot, HotCell{addresses[i], 0});
  }
  num_written_ += entries.size();
  return Status::Ok();
}

Status Shard::BeforeChange(uint64_t key, uint32_t slot) {
  const uint64_t unsaved = HotCellOf(slabs_, slot).unsaved;
  if (unsaved != 0 && unsaved <= tier_->last_checkpoint()) [[unlikely]] {
    SignIndex::Entry entry = {key, slot, 0};
    SignIndex::Entry* const entries[] = {&entry};
    PERSIA_RETURN_IF_ERROR(WriteBack(entries));
  }
  SetCell(slabs_, slot, HotCell{HotCellOf(slabs_, slot).address, tier_->batch()});
  return Status::Ok();
}

Status Shard::RemoveFromTier(SignIndex::Entry* entry) {
  uint64_t address;
  if (IsCold(slabs_, entry->slot)) {
    address = ColdCellOf(slabs_, entry->slot).address;
  } else {
    --num_hot_;
    PERSIA_RETURN_IF_ERROR(BeforeChange(entry->key, entry->slot));
    address = HotCellOf(slabs_, entry->slot).address;
  }
  if (address == pool::kNoAddress) return Status::Ok();
  const pool::RowRemoval removal{address, SignOfKey(entry->key), tier_->batch()};
  return tier_->pool().Remove({&removal, 1});
}

// Rows are written many at a time; only then do they leave the cache.
Status Shard::Demote(size_t count) {
  std::array<SignIndex::Entry*, kRowsAtATime> oldest;
  std::array<SignIndex::Entry*, kRowsAtATime> unsaved;
  const uint32_t cold_pool = slabs_.FindOrAddPool(kColdShape);
  while (count > 0) {
    coldest_.CollectMore(index_);
    size_t num_oldest = 0, num_unsaved = 0;
    while (num_oldest < std::min(count, kRowsAtATime)) {
      SignIndex::Entry* entry = coldest_.PopCollected(index_);
      if (entry == nullptr) break;
      if (IsCold(slabs_, entry->slot)) continue;
      oldest[num_oldest++] = entry;
      if (HotCellOf(slabs_, entry->slot).unsaved != 0) unsaved[num_unsaved++] = entry;
    }
    if (num_unsaved > 0) {
      PERSIA_RETURN_IF_ERROR(WriteBack(std::span(unsaved).first(num_unsaved)));
    }
    for (size_t i = 0; i < num_oldest; ++i) {
      SignIndex::Entry* entry = oldest[i];
      const uint32_t cold = slabs_.Allocate(cold_pool);
      if (cold == RowSlabs::kNoSlot) return OutOfMemory();
      const RowShape& shape = slabs_.shape(entry->slot);
      SetCell(slabs_, cold,
              ColdCell{HotCellOf(slabs_, entry->slot).address, shape.dim, shape.state_floats});
      slabs_.Free(entry->slot);
      entry->slot = cold;
      --num_hot_;
    }
    count -= num_oldest;
  }
  return Status::Ok();
}

Status Shard::LimitCache() {
  if (num_hot_ <= cache_rows_) return Status::Ok();
  tier_->Wake();
  if (num_hot_ <= cache_rows_ + cache_rows_ / 16) return Status::Ok();
  return Demote(num_hot_ - cache_rows_);
}

StatusOr<bool> Shard::ShrinkCache() {
  const std::lock_guard lock(mutex_);
  if (num_hot_ <= cache_rows_) return false;
  PERSIA_RETURN_IF_ERROR(Demote(std::min<size_t>(num_hot_ - cache_rows_, kRowsAtATime)));
  return num_hot_ > cache_rows_;
}

StatusOr<bool> Shard::WriteBackUpTo(uint64_t batch, uint64_t* next) {
  constexpr size_t kEntriesPassed = 4096;
  const std::lock_guard lock(mutex_);
  std::array<SignIndex::Entry*, kRowsAtATime> unsaved;
  size_t num_unsaved = 0, num_passed = 0;
  const bool has_ended = index_.ForEachFrom(*next, [&](SignIndex::Entry& entry) {
    if (num_unsaved == kRowsAtATime || num_passed++ == kEntriesPassed) {
      *next = entry.key;
      return false;
    }
    if (IsCold(slabs_, entry.slot)) return true;
    const HotCell cell = HotCellOf(slabs_, entry.slot);
    if (cell.unsaved != 0 && cell.unsaved <= batch) unsaved[num_unsaved++] = &entry;
    return true;
  });
  if (num_unsaved > 0) PERSIA_RETURN_IF_ERROR(WriteBack(std::span(unsaved).first(num_unsaved)));
  return !has_ended;
}

void Shard::AddTierStatsTo(TierStats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->num_hot += num_hot_;
  stats->num_rows += index_.size();
  stats->num_promoted += num_promoted_;
  stats->num_written += num_written_;
}

}  // namespace persia::store

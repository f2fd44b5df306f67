// The part of Shard that moves rows between the cache and the pool; see tier.h.
#include <algorithm>
#include <array>
#include <functional>
#include <string>

#include "store/shard.h"
#include "store/tier.h"
#include "store/tier_cells.h"
#include "store/touch.h"

namespace persia::store {
namespace {

constexpr size_t kRowsAtATime = 64;
constexpr size_t kEntriesPassed = 4096;  // of an index, at a time

}  // namespace

void Shard::SetTier(Tier* tier, CacheBudget cache, uint64_t num_wanted) {
  const std::lock_guard lock(mutex_);
  tier_ = tier;
  hot_ = cache;
  wanted_ = WantedRows(num_wanted);
  if (!tier->pool().is_mapped()) marks_ = std::make_unique<RowMarks>();
}

// Rules of another store, or of another time, would read past the ends of its rows.
Status Shard::CheckShape(const pool::RowHead& head) const {
  const RowShape shape = rules_->OfKey(SignKey(head.sign)).ShapeFor(head.dim);
  if (shape.state_floats == head.state_floats && shape.has_scalar == (head.has_scalar != 0)) {
    return Status::Ok();
  }
  return Corruption("the pool's row of sign " + std::to_string(head.sign) + " has dim " +
                    std::to_string(head.dim) + " and " + std::to_string(head.state_floats) +
                    " floats of optimizer state, and by the file rules beside the pool it has " +
                    std::to_string(shape.state_floats) +
                    "; the file is of other rows: put the right one there, or remove both and "
                    "load a checkpoint");
}

Status Shard::CheckFits(uint64_t key, uint32_t dim) const {
  if (tier_ == nullptr) [[likely]]
    return Status::Ok();
  return tier_->pool().CheckSize(dim, rules_->OfKey(key).ShapeFor(dim).state_floats);
}

Status Shard::AddRecovered(const pool::RecoveredRow& row) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckShape(row.head));
  const uint64_t key = SignKey(row.head.sign);
  const uint32_t slot = AllocateCold({row.address, row.head.dim, row.head.state_floats}, &slabs_);
  if (slot == RowSlabs::kNoSlot) return OutOfMemory();
  now_ = kStampRebase;  // stamps of the past must be there
  const auto age = static_cast<uint32_t>(std::min<uint64_t>(row.age, now_));
  if (!index_.Insert({key, slot, now_ - age})) return OutOfMemory();
  limits_.CountInsert(key);
  return Status::Ok();
}

Status Shard::FinishRecovery() {
  const std::lock_guard lock(mutex_);
  LookupReport counts;
  return Trim(&counts);
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

bool Shard::IsOf(const SignIndex::Entry& entry, const ColdReads::Row* read) const {
  return read != nullptr && read->address == ColdCellOf(slabs_, entry.slot).address &&
         read->mark == marks_->Of(entry.key);
}

Status Shard::Promote(SignIndex::Entry* entry, const ColdReads::Row* read) {
  const ColdCell cell = ColdCellOf(slabs_, entry->slot);
  const RowShape shape = ShapeOf(entry->key, cell.dim);
  const uint32_t slot = slabs_.Allocate(slabs_.FindOrAddPool(shape));
  if (slot == RowSlabs::kNoSlot) return OutOfMemory();
  pool::RowHead head;
  if (IsOf(*entry, read)) {
    head = read->head;
    std::copy(read->values.begin(), read->values.end(), slabs_.values(slot));
  } else {
    Status status =
        tier_->pool().Read(cell.address, SignOfKey(entry->key), &head,
                           std::span(slabs_.values(slot), size_t{cell.dim} + cell.state_floats));
    if (!status.ok()) {
      slabs_.Free(slot);
      return status;
    }
  }
  if (shape.has_scalar) *slabs_.scalar(slot) = head.scalar;
  SetCell(slabs_, slot, HotCell{cell.address, 0});
  slabs_.Free(entry->slot);
  entry->slot = slot;
  NoteHot(entry->key, slot);
  ++num_promoted_;
  return Status::Ok();
}

void Shard::TouchCold(std::span<SignIndex::Entry* const> entries) const {
  const auto for_each_cold = [&](const auto& touch) {
    for (const SignIndex::Entry* entry : entries) {
      if (entry != nullptr && IsCold(slabs_, entry->slot)) touch(entry->slot);
    }
  };
  for_each_cold([&](uint32_t slot) { Touch(slabs_.values(slot)); });
  for_each_cold([&](uint32_t slot) {
    const ColdCell cell = ColdCellOf(slabs_, slot);
    tier_->pool().Touch(cell.address, size_t{cell.dim} + cell.state_floats);
  });
}

void Shard::TouchForWrite(std::span<SignIndex::Entry* const> entries) const {
  for (const SignIndex::Entry* entry : entries) {
    TouchRow(slabs_.values(entry->slot), slabs_.shape(entry->slot).Stride());
  }
  for (const SignIndex::Entry* entry : entries) {
    const HotCell cell = HotCellOf(slabs_, entry->slot);
    const RowShape& shape = slabs_.shape(entry->slot);
    if (cell.unsaved == 0 || cell.address == pool::kNoAddress) continue;
    tier_->pool().Touch(cell.address, size_t{shape.dim} + shape.state_floats);
  }
}

void Shard::NoteHot(uint64_t key, uint32_t slot) {
  hot_.Add(slabs_.row_bytes(slot));
  ++num_came_;
  came_bytes_ += slabs_.row_bytes(slot);
  hot_keys_.Add(key);
  DropColdKeys();
}

// Rows that are made and removed without ever being evicted leave their keys in the list.
void Shard::DropColdKeys() {
  constexpr size_t kFew = 1024;
  if (hot_keys_.size() <= 2 * hot_.num_rows() + kFew) return;
  hot_keys_.ForEach(
      index_, [this](const SignIndex::Entry& entry) { return !IsCold(slabs_, entry.slot); },
      [](const SignIndex::Entry&) {});
}

void Shard::CollectColdest() {
  std::vector<SignIndex::Entry> candidates;
  candidates.reserve(hot_.num_rows());
  hot_keys_.ForEach(
      index_, [this](const SignIndex::Entry& entry) { return !IsCold(slabs_, entry.slot); },
      [&](const SignIndex::Entry& entry) {
        if (!wanted_.Contains(entry.key)) candidates.push_back(entry);
      });
  coldest_.CollectFrom(candidates);
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
  if (marks_ != nullptr) {
    for (const SignIndex::Entry* entry : entries) marks_->NoteWrite(entry->key);
  }
  std::vector<uint64_t> addresses(writes.size());
  PERSIA_RETURN_IF_ERROR(tier_->pool().Write(writes, addresses));
  for (size_t i = 0; i < entries.size(); ++i) {
    SetCell(slabs_, entries[i]->slot, HotCell{addresses[i], 0});
  }
  num_written_ += entries.size();
  return Status::Ok();
}

Status Shard::WriteForCheckpoint(uint64_t key, uint32_t slot) {
  if (IsCold(slabs_, slot)) return Status::Ok();
  const uint64_t unsaved = HotCellOf(slabs_, slot).unsaved;
  if (unsaved == 0 || unsaved > tier_->last_checkpoint()) [[likely]]
    return Status::Ok();
  SignIndex::Entry entry = {key, slot, 0};
  SignIndex::Entry* const entries[] = {&entry};
  return WriteBack(entries);
}

Status Shard::BeforeChange(uint64_t key, uint32_t slot) {
  PERSIA_RETURN_IF_ERROR(WriteForCheckpoint(key, slot));
  SetCell(slabs_, slot, HotCell{HotCellOf(slabs_, slot).address, tier_->batch()});
  return Status::Ok();
}

Status Shard::RemoveFromTier(const SignIndex::Entry& entry) {
  const bool is_cold = IsCold(slabs_, entry.slot);
  const uint64_t address =
      is_cold ? ColdCellOf(slabs_, entry.slot).address : HotCellOf(slabs_, entry.slot).address;
  if (!is_cold) hot_.Remove(slabs_.row_bytes(entry.slot));
  if (address == pool::kNoAddress) return Status::Ok();
  const pool::RowRemoval removal{address, SignOfKey(entry.key), tier_->batch()};
  return tier_->pool().Remove({&removal, 1});
}

// Rows are written many at a time; only then do they leave the cache.
Status Shard::DemoteRows(std::span<SignIndex::Entry* const> entries) {
  std::array<SignIndex::Entry*, kRowsAtATime> unsaved;
  size_t num_unsaved = 0;
  TouchForWrite(entries);
  for (SignIndex::Entry* entry : entries) {
    if (HotCellOf(slabs_, entry->slot).unsaved != 0) unsaved[num_unsaved++] = entry;
  }
  if (num_unsaved > 0) PERSIA_RETURN_IF_ERROR(WriteBack(std::span(unsaved).first(num_unsaved)));
  for (SignIndex::Entry* entry : entries) {
    const RowShape& shape = slabs_.shape(entry->slot);
    const uint32_t cold = AllocateCold(
        {HotCellOf(slabs_, entry->slot).address, shape.dim, shape.state_floats}, &slabs_);
    if (cold == RowSlabs::kNoSlot) return OutOfMemory();
    hot_.Remove(slabs_.row_bytes(entry->slot));
    slabs_.Free(entry->slot);
    entry->slot = cold;
    ++num_demoted_;
  }
  return Status::Ok();
}

// Rows that stay because there was no room are in their turn again with the next pass.
Status Shard::Demote(size_t count) {
  std::array<SignIndex::Entry*, kRowsAtATime> oldest;
  while (count > 0) {
    if (coldest_.is_empty()) CollectColdest();
    if (coldest_.is_empty()) wanted_.Clear();  // there are no others
    size_t num_oldest = 0;
    while (num_oldest < std::min(count, kRowsAtATime)) {
      SignIndex::Entry* entry = coldest_.PopCollected(index_);
      if (entry == nullptr) break;
      if (IsCold(slabs_, entry->slot) || wanted_.Contains(entry->key)) continue;
      oldest[num_oldest++] = entry;
    }
    PERSIA_RETURN_IF_ERROR(DemoteRows(std::span(oldest).first(num_oldest)));
    count -= num_oldest;
  }
  return Status::Ok();
}

Status Shard::DemoteLoaded(std::span<const Run> runs) {
  std::array<SignIndex::Entry*, kRowsAtATime> rows;
  size_t num_rows = 0;
  for (const Run& run : runs) {
    for (const RowRef& ref : run.refs) {
      if (hot_.Excess() <= num_rows) break;
      SignIndex::Entry* entry = index_.Find(ref.key);
      if (entry == nullptr || IsCold(slabs_, entry->slot)) continue;
      // A sign that is named twice has one row.
      if (std::find(rows.begin(), rows.begin() + num_rows, entry) != rows.begin() + num_rows) {
        continue;
      }
      rows[num_rows++] = entry;
      if (num_rows < kRowsAtATime) continue;
      PERSIA_RETURN_IF_ERROR(DemoteRows(rows));
      num_rows = 0;
    }
  }
  PERSIA_RETURN_IF_ERROR(DemoteRows(std::span(rows).first(num_rows)));
  return LimitCache();
}

// The lists have grown with the rows of the largest call. What they do not need any more is given
// back first: rows would be evicted for its sake.
void Shard::MeasureCache() {
  if (!hot_.counts_bytes()) return;
  DropColdKeys();
  hot_keys_.TrimMemory();
  coldest_.TrimMemory();
  const uint64_t cell_bytes = slabs_.memory_bytes() - slabs_.row_slab_bytes();
  hot_.SetBeside(index_.memory_bytes() + cell_bytes + hot_keys_.memory_bytes() +
                 coldest_.memory_bytes() + wanted_.memory_bytes() + victims_.memory_bytes() +
                 limits_.memory_bytes() + filter_.memory_bytes() + expiry_.memory_bytes());
}

Status Shard::LimitCache() {
  MeasureCache();
  Status status;
  if (!hot_.IsWithin(32) || ExcessOfSlabs() > 0) {
    tier_->NoteCrowd();
    if (!hot_.IsWithin(16)) status = MakeUpForWhatCame();
  }
  num_came_ = came_bytes_ = 0;
  return status;
}

// Twice that much leaves, at most: what else is too much, because something else has grown, is for
// the keeper.
Status Shard::MakeUpForWhatCame() {
  const uint64_t num_rows = hot_.num_rows(), num_bytes = hot_.num_bytes();
  const auto is_done = [&] {
    return num_rows - hot_.num_rows() >= 2 * num_came_ + kRowsAtATime &&
           num_bytes - hot_.num_bytes() >= 2 * came_bytes_;
  };
  while (hot_.Excess() > 0 && !is_done()) {
    PERSIA_RETURN_IF_ERROR(Demote(std::min(hot_.Excess(), kRowsAtATime)));
    MeasureCache();  // the lists shrink with the rows
  }
  return Status::Ok();
}

StatusOr<bool> Shard::ShrinkCache() {
  Lock lock(mutex_);
  MeasureCache();
  if (hot_.Excess() > 0 && marks_ != nullptr) BringOldestNear(&lock);
  const uint64_t excess = hot_.Excess();
  if (excess == 0) return false;
  PERSIA_RETURN_IF_ERROR(Demote(std::min<size_t>(excess, kRowsAtATime)));
  return hot_.Excess() > 0;
}

uint64_t Shard::ExcessOfSlabs() const {
  const bool may_be_too_many = hot_.counts_bytes() && slabs_.CanLeave();
  return may_be_too_many ? hot_.ExcessOfSlabs(slabs_.row_slab_bytes()) : 0;
}

// All entries of the index are gone through, so a cache that is too small for its calls, and has
// too many slabs after each, must not have this all the time.
Shard::GiveBack Shard::GiveBackMemory(uint64_t* next) {
  constexpr uint64_t kMostAtATime = 16 << 20;  // bytes
  constexpr int kRestPerWork = 20;
  constexpr std::chrono::milliseconds kShortestRest{50}, kLongestRest{2000};
  const std::lock_guard lock(mutex_);
  if (*next == 0) {
    MeasureCache();
    const uint64_t excess = ExcessOfSlabs();
    if (excess == 0 && !slabs_.HasLeaving()) return GiveBack::kNothing;
    leaving_since_ = std::chrono::steady_clock::now();
    if (leaving_since_ < rests_until_) return GiveBack::kLater;
    slabs_.BeginLeaving(std::min(excess, kMostAtATime));
  }
  size_t num_moved = 0, num_passed = 0;
  const bool has_ended = index_.ForEachFrom(*next, [&](SignIndex::Entry& entry) {
    if (num_moved == kRowsAtATime || num_passed++ == kEntriesPassed) {
      *next = entry.key;
      return false;
    }
    if (slabs_.IsLeaving(entry.slot)) num_moved += MoveRow(&entry);
    return true;
  });
  if (!has_ended) return GiveBack::kMore;
  slabs_.FinishLeaving();
  const auto end = std::chrono::steady_clock::now();
  const std::chrono::nanoseconds rest = kRestPerWork * (end - leaving_since_);
  rests_until_ = end + std::clamp<std::chrono::nanoseconds>(rest, kShortestRest, kLongestRest);
  return GiveBack::kLater;  // there may be more
}

bool Shard::MoveRow(SignIndex::Entry* entry) {
  const RowShape& shape = slabs_.shape(entry->slot);
  const uint32_t slot = slabs_.Allocate(slabs_.FindOrAddPool(shape));
  if (slot == RowSlabs::kNoSlot) return false;  // it stays, and its slab with it
  std::copy_n(slabs_.values(entry->slot), shape.Stride(), slabs_.values(slot));
  if (shape.has_scalar) *slabs_.scalar(slot) = *slabs_.scalar(entry->slot);
  slabs_.Free(entry->slot);
  entry->slot = slot;
  ++num_moved_;
  return true;
}

// The system reads the page of a file that a row is written to, and that should not take place with
// the shard locked. Which rows leave is decided behind it, anew.
void Shard::BringOldestNear(Lock* lock) {
  std::vector<pool::RowPool::Place> places;
  if (coldest_.is_empty()) CollectColdest();
  coldest_.Peek(index_, kRowsAtATime, [&](const SignIndex::Entry& entry) {
    if (IsCold(slabs_, entry.slot) || wanted_.Contains(entry.key)) return false;
    const HotCell cell = HotCellOf(slabs_, entry.slot);
    const RowShape& shape = slabs_.shape(entry.slot);
    if (cell.unsaved != 0 && cell.address != pool::kNoAddress) {
      places.push_back({cell.address, size_t{shape.dim} + shape.state_floats});
    }
    return true;
  });
  if (places.empty()) return;
  lock->unlock();
  tier_->pool().BringNear(places);
  lock->lock();
}

StatusOr<bool> Shard::WriteBackUpTo(uint64_t batch, uint64_t* next) {
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

// What cannot be brought here, the lookup will be told.
Status Shard::FetchAhead(std::span<const uint64_t> keys) {
  Lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(LimitCache());
  ColdReads reads;
  ReadAside(&lock, keys, std::identity(), &reads);
  std::array<SignIndex::Entry*, kAheadAtATime> entries;
  for (size_t i = 0; i < keys.size(); ++i) entries[i] = index_.Find(keys[i]);
  if (reads.is_empty()) TouchCold(std::span(entries).first(keys.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    SignIndex::Entry* entry = entries[i];
    const ColdReads::Row* read = reads.Find(keys[i]);
    if (entry == nullptr) continue;
    wanted_.Add(entry->key);
    if (!IsCold(slabs_, entry->slot)) continue;
    PERSIA_RETURN_IF_ERROR(Promote(entry, read));
    ++num_prefetched_;
  }
  return LimitCache();
}

void Shard::AddTierStatsTo(TierStats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->num_hot += hot_.num_rows();
  stats->hot_bytes += hot_.num_bytes();
  stats->num_rows += index_.size();
  stats->num_hits += num_hits_;
  stats->num_misses += num_misses_;
  stats->num_promoted += num_promoted_;
  stats->num_prefetched += num_prefetched_;
  stats->num_demoted += num_demoted_;
  stats->num_passes += coldest_.num_passes();
  stats->num_written += num_written_;
  stats->num_moved += num_moved_;
}

}  // namespace persia::store

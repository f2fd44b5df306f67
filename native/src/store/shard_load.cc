// The part of Shard that takes in rows of a checkpoint; see store_load.h.
#include <algorithm>
#include <cstring>

#include "store/shard.h"
#include "store/store_load.h"
#include "store/touch.h"

namespace persia::store {
namespace {

constexpr size_t kTouchedAtATime = 256;

}  // namespace

// Stamps of the past must be there for the rows to come: the present moves on by 2^31 batches,
// which is also as far back as RebaseStamps() remembers.
void Shard::BeginLoad() {
  std::lock_guard lock(mutex_);
  expiry_.Forget();
  if (now_ >= kStampRebase) return;
  const uint32_t rise = kStampRebase - now_;
  index_.ForEach([rise](SignIndex::Entry& entry) { entry.stamp += rise; });
  ForgetVictims();
  now_ += rise;
}

void Shard::Reserve(uint64_t num_rows) {
  std::lock_guard lock(mutex_);
  index_.Reserve(std::min(num_rows, capacity_ + capacity_ / 4));
}

Status Shard::Load(std::span<const Run> runs, const LoadedRows& rows, LookupReport* counts) {
  std::lock_guard lock(mutex_);
  ForgetOldest();
  ChangeBatch changed(changes_);
  for (const Run& run : runs) {
    size_t num_touched = 0;
    for (size_t i = 0; i < run.refs.size(); ++i) {
      if (i == num_touched) {
        num_touched = std::min(i + kTouchedAtATime, run.refs.size());
        TouchHomes(run.refs.subspan(i, num_touched - i));
      }
      const RowRef& ref = run.refs[i];
      const uint32_t age = rows.ages[ref.row];
      const uint32_t stamp = now_ - std::min(now_, age);
      SignIndex::Entry* entry = index_.Find(ref.key);
      if (entry != nullptr && IsColdOfDim(*entry, run.dim)) {
        PERSIA_RETURN_IF_ERROR(Promote(entry));
      }
      Status status;
      entry = RemoveOfAnotherDim(ref.key, run.dim, &status);
      if (!status.ok()) return status;
      if (entry == nullptr) {
        PERSIA_RETURN_IF_ERROR(CheckFits(ref.key, run.dim));
        if (AllocateRow(ref.key, run.dim, stamp) == RowSlabs::kNoSlot) return OutOfMemory();
        entry = index_.Find(ref.key);
        ++counts->num_inserted;
      } else {
        if (snapshot_ != nullptr) snapshot_->SaveBeforeTouch(*entry, slabs_);
        if (!MayChange(ref.key, entry->slot, &status)) return status;
        entry->stamp = stamp;
        changed.Add(ref.key);
      }
      const RowView row = slabs_.View(entry->slot);
      format_.Write(row.values, rows.embeddings + size_t{ref.row} * run.dim, run.dim);
      LoadState(rows, ref, row);
      BeginCount(entry->slot);
    }
  }
  if (index_.size() > capacity_ + capacity_ / 4) PERSIA_RETURN_IF_ERROR(Trim(counts));
  return tier_ == nullptr ? Status::Ok() : DemoteLoaded(runs);
}

// The queues know nothing of older rows that come later. Which rows leave the cache meanwhile makes
// no difference, and to find them takes a pass over the index.
void Shard::ForgetOldest() {
  victims_.Clear();
  limits_.ForgetVictims();
}

// Their places in the index, all misses at once.
void Shard::TouchHomes(std::span<const RowRef> refs) const {
  for (const RowRef& ref : refs) Touch(index_.HomeOf(ref.key));
}

Status Shard::RemoveRows(std::span<const Run> runs) {
  std::lock_guard lock(mutex_);
  ForgetVictims();
  for (const Run& run : runs) {
    for (const RowRef& ref : run.refs) {
      SignIndex::Entry* entry = index_.Find(ref.key);
      if (entry != nullptr) PERSIA_RETURN_IF_ERROR(Remove(entry));
    }
  }
  return Status::Ok();
}

void Shard::LoadState(const LoadedRows& rows, const RowRef& ref, const RowView& row) const {
  const RowRules& rules = rules_->OfKey(ref.key);
  if (rows.state == nullptr) return rules.InitializeState(row);
  const size_t state_floats = rules.ShapeFor(row.dim).state_floats;
  std::memcpy(row.state, rows.state + ref.row * state_floats, state_floats * sizeof(float));
  if (row.scalar != nullptr) *row.scalar = rows.scalars[ref.row];
}

Status Shard::Trim(LookupReport* counts) {
  Status status = MakeRoomInGroups(/*keep_batch=*/false, counts).status();
  if (status.ok()) status = MakeRoom(0, /*keep_batch=*/false, counts).status();
  ForgetVictims();
  return status;
}

void Shard::FinishLoad(LookupReport* counts) {
  std::lock_guard lock(mutex_);
  ForgetVictims();
  // Where there is no room for that, rows beyond the capacity go when the next ones come.
  static_cast<void>(Trim(counts));
}

}  // namespace persia::store

// RowFeatures: what attaches to the rows of an internal shard (RowTable's Features). Each feature
// is off, or null, until the store uses it.
//
// The hooks are the whole interface between a table and features. A feature that must know when
// rows change adds its part to the hooks here, and neither RowTable nor Shard learns of it. Hooks
// are inline: without features they are a branch each, per row or per run of rows.
//
// Thread safety: the store sets `snapshot` and `changes` while it is locked exclusively; all else
// is guarded like the shard's rows. BeforeTouch() may run in several threads for different rows
// (InPlaceRows), which only `snapshot` must bear.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/status.h"
#include "store/admission_filter.h"
#include "store/change_set.h"
#include "store/expiry.h"
#include "store/group_limits.h"
#include "store/row_cache.h"
#include "store/row_slabs.h"
#include "store/shard_snapshot.h"
#include "store/sign_index.h"

namespace persia::store {

// How many updates a row has had, in stores that count them. The count is kept behind the row's
// state, so that it moves with the row and costs no memory in stores that do not count. It is a
// float's memory and is copied, not cast: it need not be aligned for an integer.
inline constexpr uint32_t kUpdateCountFloats = 1;
static_assert(sizeof(uint32_t) == kUpdateCountFloats * sizeof(float));

// `values` are a row's, of a shape with such a tail or that shape without it.
inline uint32_t UpdateCountOf(const float* values, const RowShape& shape) {
  uint32_t count;
  std::memcpy(&count, values + size_t{shape.embedding_floats()} + shape.state_floats,
              sizeof(count));
  return count;
}
inline void SetUpdateCount(float* values, const RowShape& shape, uint32_t count) {
  std::memcpy(values + size_t{shape.embedding_floats()} + shape.state_floats, &count,
              sizeof(count));
}
// One more; the greatest count stays.
inline void CountUpdate(float* values, const RowShape& shape) {
  const uint32_t count = UpdateCountOf(values, shape);
  if (count != UINT32_MAX) SetUpdateCount(values, shape, count + 1);
}

struct RowFeatures {
  ShardSnapshot* snapshot = nullptr;  // rows are saved for it before they change
  ChangeSet* changes = nullptr;       // keys of rows that change are added to it
  RowCache* cache = nullptr;          // of a storage tier; null: all rows are resident
  GroupLimits limits;                 // capacities of feature groups
  Expiry expiry;                      // times to live
  AdmissionFilter sightings;          // of keys without a row, where policies count them
  bool counts_updates = false;        // of each row (UpdateCountOf); not with a cache

  // Before the row's stamp changes: a snapshot tells by the stamp which rows it has still to save.
  void BeforeTouch(const SignIndex::Entry& entry, const RowSlabs& slabs) {
    if (snapshot != nullptr) [[unlikely]]
      snapshot->SaveBeforeTouch(entry, slabs);
  }
  // Before the values of a row change that was not touched for it. False: it must stay as it is;
  // *status is why, and false is returned for all that follow.
  bool BeforeUpdate(const SignIndex::Entry& entry, const RowSlabs& slabs, Status* status) {
    if (snapshot != nullptr) [[unlikely]]
      snapshot->SaveBeforeUpdate(entry, slabs);
    return BeforeChange(entry, status);
  }
  // The same for a row that was touched for this change, and hence saved already.
  bool BeforeChange(const SignIndex::Entry& entry, Status* status) {
    return cache == nullptr || cache->BeforeChange(entry, status);
  }
  // After a row was inserted. Its values are not set yet.
  void Inserted(uint64_t key, uint32_t cell, const RowSlabs& slabs) {
    BeginCount(cell, slabs);
    if (cache != nullptr) cache->NoteInserted(key, cell);
    limits.CountInsert(key);
    if (changes != nullptr) [[unlikely]]
      changes->Add(key);
  }
  // A row's values are new: it has had no updates.
  void BeginCount(uint32_t cell, const RowSlabs& slabs) const {
    if (counts_updates) SetUpdateCount(slabs.values(cell), slabs.shape(cell), 0);
  }
  // Before a row is removed. An error means that it stays: so what may fail comes first. A snapshot
  // reads the row before the tier deletes it.
  Status BeforeRemove(const SignIndex::Entry& entry, const RowSlabs& slabs) {
    if (cache != nullptr) PERSIA_RETURN_IF_ERROR(cache->WriteForCheckpoint(entry.key, entry.cell));
    BeforeTouch(entry, slabs);
    if (changes != nullptr) [[unlikely]]
      changes->Add(entry.key);
    if (cache != nullptr) cache->NoteRemoval(entry);
    limits.CountRemoval(entry.key);
    return Status::Ok();
  }
  // Before all rows are removed. A snapshot that still needs them takes index and slabs over.
  void BeforeClear(SignIndex* index, RowSlabs* slabs) {
    if (snapshot != nullptr) snapshot->TakeOver(std::move(*index), std::move(*slabs));
    if (cache != nullptr) cache->Clear();
    limits.CountClear();
    sightings.Clear();
  }
  // All stamps are about to fall by kStampRebase, so that new ones do not overflow.
  void StampsFell() {
    if (snapshot != nullptr) snapshot->RebaseStamp();
    expiry.Forget();
    ForgetVictims();
  }
  // Forgets every order of eviction but the table's own; see VictimQueue::Clear().
  void ForgetVictims() {
    limits.ForgetVictims();
    if (cache != nullptr) cache->ForgetVictims();
  }
  // What the cache, or the count of updates, keeps behind each row's state.
  uint32_t tail_floats() const {
    return cache != nullptr ? kHotRowFloats : counts_updates ? kUpdateCountFloats : 0;
  }
  uint64_t memory_bytes() const {
    return limits.memory_bytes() + expiry.memory_bytes() + sightings.memory_bytes();
  }
};

}  // namespace persia::store

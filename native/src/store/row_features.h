// RowFeatures: what attaches to the rows of an internal shard (RowTable's Features). Each feature
// is off, or null, until the store uses it.
//
// The store sets `snapshot` and `changes` while it is locked exclusively; all else is guarded like
// the shard's rows. Hooks are inline: without features they are a branch each.
#pragma once

#include <cstdint>
#include <utility>

#include "base/status.h"
#include "store/admission_filter.h"
#include "store/change_set.h"
#include "store/expiry.h"
#include "store/group_limits.h"
#include "store/row_slabs.h"
#include "store/shard_snapshot.h"
#include "store/sign_index.h"
#include "store/update_count.h"

namespace persia::store {

class RowCache;

struct RowFeatures {
  ShardSnapshot* snapshot = nullptr;  // rows are saved for it before they change
  ChangeSet* changes = nullptr;       // keys of rows that change are added to it
  RowCache* cache = nullptr;          // of a storage tier; null: all rows are resident
  GroupLimits limits;                 // capacities of feature groups
  Expiry expiry;                      // times to live
  AdmissionFilter sightings;          // of keys without a row, where policies count them
  bool counts_updates = false;        // of each row (update_count.h); not with a cache

  // Before the row's stamp changes.
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
  // The same for a row that was touched.
  bool BeforeChange(const SignIndex::Entry& entry, Status* status) {
    return cache == nullptr || BeforeChangeOfCache(entry, status);
  }
  void Inserted(uint64_t key, uint32_t cell, const RowSlabs& slabs) {
    BeginCount(cell, slabs);
    if (cache != nullptr) InsertedInCache(key, cell);
    limits.CountInsert(key);
    if (changes != nullptr) [[unlikely]]
      changes->Add(key);
  }
  // A row's values are new: it has had no updates.
  void BeginCount(uint32_t cell, const RowSlabs& slabs) const {
    if (counts_updates) SetUpdateCount(slabs.values(cell), slabs.shape(cell), 0);
  }
  // In this order: what may fail comes first, and a snapshot reads the row before its tier does
  // not have it any more.
  Status BeforeRemove(const SignIndex::Entry& entry, const RowSlabs& slabs) {
    if (cache != nullptr) PERSIA_RETURN_IF_ERROR(BeforeRemoveFromCache(entry));
    BeforeTouch(entry, slabs);
    if (changes != nullptr) [[unlikely]]
      changes->Add(entry.key);
    if (cache != nullptr) RemoveFromCache(entry);
    limits.CountRemoval(entry.key);
    return Status::Ok();
  }
  void BeforeClear(SignIndex* index, RowSlabs* slabs) {
    if (snapshot != nullptr) snapshot->TakeOver(std::move(*index), std::move(*slabs));
    if (cache != nullptr) ClearCache();
    limits.CountClear();
    sightings.Clear();
  }
  void StampsFell() {
    if (snapshot != nullptr) snapshot->RebaseStamp();
    expiry.Forget();
    ForgetVictims();
  }
  // Where the table forgets its own.
  void ForgetVictims() {
    limits.ForgetVictims();
    if (cache != nullptr) ForgetVictimsOfCache();
  }
  uint64_t memory_bytes() const {
    return limits.memory_bytes() + expiry.memory_bytes() + sightings.memory_bytes();
  }

 private:
  // In row_cache.cc.
  bool BeforeChangeOfCache(const SignIndex::Entry& entry, Status* status);
  void InsertedInCache(uint64_t key, uint32_t cell);
  Status BeforeRemoveFromCache(const SignIndex::Entry& entry);
  void RemoveFromCache(const SignIndex::Entry& entry);
  void ClearCache();
  void ForgetVictimsOfCache();
};

}  // namespace persia::store

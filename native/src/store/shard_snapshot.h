// ShardSnapshot: the rows of one internal shard as they were at a cut, while training changes them.
//
// Of changes (store_snapshot.h), these are the rows that changed since the cut before; keys among
// them that had no row at the cut are read as removals.
//
// A reader walks through the index, or the changed keys, in their order. Whoever changes a row that
// was there at the cut and has not been read yet saves a copy first; the reader takes these copies
// too, so that in the end it has had each row of the cut once. What tells a row that needs no copy:
//  * its stamp is above the cut's: it was made since, or touched by a lookup, which saved it;
//  * its key is below the reader's position: it has been read;
//  * its key is in saved_keys_: it was updated without a lookup since the cut, which leaves the
//    stamp alone. There are few: batches whose lookup came before the cut and update after it. Of
//    changes, all saved ones are there, to be told from removals.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pool/row_pool.h"
#include "store/change_set.h"
#include "store/row_records.h"
#include "store/row_slabs.h"
#include "store/sign_index.h"
#include "store/snapshot_budget.h"

namespace persia::store {

// The Save methods may be called by several threads at once, each with rows of its own, and at the
// same time as TakeSaved(). For all others the caller holds the shard ("locked").
class ShardSnapshot {
 public:
  // `stamp` is the shard's at the cut. With `changes` only they are wanted; SetChangedKeys() says
  // them again, in order, before the first Read().
  // Rows that are not in memory are read from `pool`; null: there are none.
  ShardSnapshot(uint32_t stamp, SnapshotBudget* budget, const ChangeSet* changes,
                const pool::RowPool* pool)
      : stamp_(stamp), budget_(*budget), pool_(pool), changes_(changes) {}
  void SetChangedKeys(std::vector<uint64_t> keys) { keys_ = std::move(keys); }

  // Before the row gets a new stamp or is removed.
  void SaveBeforeTouch(const SignIndex::Entry& entry, const RowSlabs& slabs) {
    if (entry.stamp <= stamp_ && IsUnread(entry.key)) Save(entry, slabs, /*keeps_stamp=*/false);
  }
  // Before its values change and its stamp does not.
  void SaveBeforeUpdate(const SignIndex::Entry& entry, const RowSlabs& slabs) {
    if (entry.stamp <= stamp_ && IsUnread(entry.key)) Save(entry, slabs, /*keeps_stamp=*/true);
  }
  // Locked. All rows go: what has not been read yet is read from here.
  void TakeOver(SignIndex index, RowSlabs slabs);
  // Locked. All stamps of the shard are about to be re-based.
  void RebaseStamp();

  // Locked, with what the shard has. Appends some of the unread rows; false: there are no more, and
  // what TakeSaved() returns from then on is the rest.
  bool Read(const SignIndex& index, const RowSlabs& slabs, size_t max_rows, RowRecords* rows);
  // Appends the rows that were saved since the last call. They go back to the budget afterwards.
  void TakeSaved(std::vector<RowRecords>* rows);

 private:
  bool IsUnread(uint64_t key) const {
    return !is_read_ && key >= next_key_ && (changes_ == nullptr || changes_->Contains(key));
  }
  // One step through the keys: what is to be read comes to step_ and removed_. A step ends early
  // where it has to read from the pool.
  void StepThroughIndex(const SignIndex& index, const RowSlabs& slabs, size_t max_rows);
  void StepThroughKeys(const SignIndex& index, const RowSlabs& slabs, size_t max_rows);
  bool IsColdRow(const SignIndex::Entry& entry, const RowSlabs& slabs) const;
  RowHead HeadOf(const SignIndex::Entry& entry, const RowSlabs& slabs) const;
  // Its head and values; *values is where they come to when they are not in memory. The dim is 0
  // where they cannot be read, which fails the snapshot.
  std::pair<RowHead, const float*> RowOf(const SignIndex::Entry& entry, const RowSlabs& slabs,
                                         std::vector<float>* values) const;
  void Save(const SignIndex::Entry& entry, const RowSlabs& slabs, bool keeps_stamp);

  uint32_t stamp_;
  SnapshotBudget& budget_;
  const pool::RowPool* const pool_;
  uint64_t next_key_ = 0;
  bool is_read_ = false;
  bool has_taken_over_ = false;  // the rows of the cut are in the two that follow
  SignIndex index_;
  RowSlabs slabs_{nullptr};
  const ChangeSet* changes_;            // null: all rows are wanted
  std::vector<uint64_t> keys_;          // of changes_ in this shard
  size_t position_ = 0;                 // in keys_
  std::vector<SignIndex::Entry> step_;  // of Read()
  std::vector<uint64_t> removed_;       // of Read()

  std::mutex mutex_;  // guards what follows
  std::vector<RowRecords> saved_;
  std::unordered_set<uint64_t> saved_keys_;
};

}  // namespace persia::store

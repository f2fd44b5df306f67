// RowCache: the rows of an internal shard that are resident in DRAM, where the shard's store has a
// storage tier (store_tier.h).
//
// The shard's table knows all rows. A resident row has a cell like those of a store without a tier;
// a cold row has a cell of eight bytes that says where the tier stores it (cold_rows.h). The cache
// promotes cold rows that a call needs, notes which rows the tier lacks, and demotes the oldest
// ones once the budget is exceeded. A call leaves at most a sixteenth more than the budget behind;
// the store's maintenance thread does the rest.
//
// Methods marked "locks" take the shard's mutex; the caller of all others holds it. Where reading
// from the tier takes long, it is released meanwhile (cold_rows.h): methods that take a `lock` may
// do so, and entries found before them are invalid then.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/cold_rows.h"
#include "store/resident_rows.h"
#include "store/row_table.h"
#include "store/store_tier.h"
#include "store/types.h"

namespace persia::store {

inline constexpr auto kKeyOfMissing = [](const MissingRef& missing) { return missing.ref->key; };

struct RowFeatures;
using ShardTable = RowTable<RowFeatures>;

class RowCache {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using Entry = SignIndex::Entry;

  // Before any row is resident. `features` are the table's. The last `num_pinned` rows of prefetch
  // hints are demoted after all others. All outlive the cache.
  RowCache(std::mutex* mutex, ShardTable* table, RowFeatures* features, StoreTier* tier,
           CacheBudget budget, uint64_t num_pinned);

  // Locks. Demotes some tens of rows; false: the cache is within its budget.
  StatusOr<bool> Shrink();
  // Locks. After Shrink(), from the key *next on: memory that rows have left is given back, of a
  // budget in bytes. Rows in its way are moved, some tens at a time. kLater: done just now.
  enum class GiveBack { kNothing, kMore, kLater };
  GiveBack GiveBackMemory(uint64_t* next);
  // Locks. Writes rows that changed up to the batch, from the key *next on; false: none are left.
  StatusOr<bool> WriteBackUpTo(uint64_t batch, uint64_t* next);
  // Locks. Promotes the rows of prefetch hints, at most kAheadAtATime, and pins them for a while.
  Status Prefetch(std::span<const uint64_t> keys);
  // Locks.
  void AddStatsTo(TierStats* stats) const;

  // Without the rows.
  uint64_t memory_bytes() const {
    return list_bytes() + (marks_ == nullptr ? 0 : sizeof(RowMarks));
  }

  StoreTier& tier() { return tier_; }
  // Whether a row that looks missing is one of that dim in the tier.
  bool IsColdOfDim(const Entry& entry, uint32_t dim) const {
    return IsCold(slabs_, entry.cell) && ColdRowOf(slabs_, entry.cell).dim == dim;
  }
  // kInvalidArgument: a new row of that dim would be too large for the tier.
  Status CheckFits(uint64_t key, uint32_t dim) const;

  // Makes a cold row resident; its entry has another cell afterwards. kResourceExhausted: no
  // memory.
  Status Promote(Entry* entry) { return Promote(entry, nullptr); }
  // The embedding of a cold row, which stays cold.
  Status CopyCold(const Entry& entry, uint32_t dim, float* out) const;

  // Before Fetch(): evicts the missing rows that are cold after all others, though the mutex may be
  // released. Not while a snapshot needs their stamps.
  void KeepCold(std::span<const MissingRef> missing);
  // Promotes those of *missing that are cold and calls use(missing, entry) for them; the others
  // stay in *missing. Calls flush() before rows may move.
  template <typename Use, typename Flush>
  Status Fetch(Lock* lock, std::vector<MissingRef>* missing, Use use, Flush flush);
  // For inference: copies embeddings of cold rows, which stay cold, to `rows`.
  Status Read(Lock* lock, std::vector<MissingRef>* missing, float* rows);
  // For TierStats: resident rows that a lookup found, and cold ones that it read.
  void CountHits(uint64_t num_hits, uint64_t num_misses) {
    num_hits_ += num_hits;
    num_misses_ += num_misses;
  }

  // At the end of a call that made rows resident: demotes about as many where there are too many.
  Status Limit();
  // Locks. Before an update: writes what a pending checkpoint needs of the rows, so that a lack of
  // room is found before any gradient is applied.
  Status PrepareUpdate(std::span<const Run> runs);
  // As Limit(), at the end of an update that ended with `status`. An update that failed half way
  // stops the store: no checkpoint may begin that has a part of it.
  Status EndUpdate(Status status);
  // Of rows that were just loaded, demotes as many as the cache has too many.
  Status DemoteLoaded(std::span<const Run> runs);

 private:
  friend struct RowFeatures;

  // RowFeatures' hooks, for every row of the shard.
  //
  // Writes what a pending checkpoint needs of a row: before the row changes or is removed. An error
  // means that it must stay as it is.
  Status WriteForCheckpoint(uint64_t key, uint32_t cell);
  // Before the values of a resident row change. False: they must not; *status is why, and false is
  // returned for all that follow.
  bool BeforeChange(const Entry& entry, Status* status);
  void NoteInserted(uint64_t key, uint32_t cell);
  // After WriteForCheckpoint(), before the row's cell is freed.
  void NoteRemoval(const Entry& entry);
  void Clear();
  void ForgetVictims() { oldest_.Clear(); }

  // That are demoted, written or moved while the mutex is held: some tens of microseconds.
  static constexpr size_t kRowsAtATime = 64;

  uint64_t list_bytes() const {
    return hot_keys_.memory_bytes() + oldest_.memory_bytes() + pinned_.memory_bytes();
  }
  // `read`, which may be null, is what the tier stores of the row: it is not read again.
  Status Promote(Entry* entry, const pool::RowRead* read);
  // Reads the cold rows of some keys, key_of(item). True: the mutex was released meanwhile.
  template <typename Items, typename KeyOf>
  bool ReadAside(Lock* lock, const Items& items, KeyOf key_of, ColdReads* reads) const;
  template <typename Use>
  Status FetchSome(std::span<const MissingRef> some, ColdReads* reads, Use use,
                   std::vector<MissingRef>* left);
  Status ReadSome(Lock* lock, std::span<const MissingRef> some, float* rows,
                  std::vector<MissingRef>* left);
  // Overlap the cache misses of what follows for these entries; null ones are skipped.
  void TouchCold(std::span<Entry* const> entries) const;
  void TouchForWrite(std::span<Entry* const> entries) const;

  void NoteResident(uint64_t key, uint32_t cell);
  void DropColdKeys();
  void CollectOldest();
  void PrefetchOldest(Lock* lock);
  // Demotes the `count` oldest rows; fewer where there are no more.
  Status Demote(size_t count);
  // At most kRowsAtATime. Rows that the tier lacks are written first; where that fails, all stay.
  Status DemoteRows(std::span<Entry* const> entries);
  // Writes rows to the tier, where they stay resident.
  Status WriteBack(std::span<Entry* const> entries);
  Status EvictToBudget();
  // Tells the budget how much memory is used beside the resident rows.
  void Measure();
  uint64_t ExcessOfSlabs() const;
  bool MoveRow(Entry* entry);

  std::mutex& mutex_;  // the shard's
  ShardTable& table_;
  const SignIndex& index_;  // the table's
  RowSlabs& slabs_;         // the table's
  RowFeatures& features_;
  StoreTier& tier_;
  CacheBudget resident_;
  uint64_t num_came_ = 0;    // rows that became resident since the last Limit()
  uint64_t came_bytes_ = 0;  // that they take
  uint64_t num_hits_ = 0;
  uint64_t num_misses_ = 0;
  uint64_t num_promoted_ = 0;
  uint64_t num_prefetched_ = 0;
  uint64_t num_demoted_ = 0;
  uint64_t num_written_ = 0;
  uint64_t num_moved_ = 0;
  std::chrono::steady_clock::time_point leaving_since_;
  std::chrono::steady_clock::time_point rests_until_;
  HotKeys hot_keys_;
  VictimQueue oldest_;  // of the resident rows
  PinnedRows pinned_;
  std::unique_ptr<RowMarks> marks_;  // null: the tier is mapped memory, and no read takes long
};

template <typename Items, typename KeyOf>
bool RowCache::ReadAside(Lock* lock, const Items& items, KeyOf key_of, ColdReads* reads) const {
  if (marks_ == nullptr) return false;
  for (const auto& item : items) {
    const Entry* entry = index_.Find(key_of(item));
    if (entry == nullptr || !IsCold(slabs_, entry->cell)) continue;
    reads->Add(entry->key, ColdRowOf(slabs_, entry->cell), marks_->Of(entry->key));
  }
  if (reads->is_empty()) return false;
  lock->unlock();
  reads->ReadFrom(tier_.pool());
  lock->lock();
  return true;
}

// While the mutex is released, other calls may insert rows that were missing, and those may have
// been demoted since: hence the second round, which does not release it.
template <typename Use, typename Flush>
Status RowCache::Fetch(Lock* lock, std::vector<MissingRef>* missing, Use use, Flush flush) {
  thread_local ColdReads reads;
  thread_local std::vector<MissingRef> left;
  Status status;
  bool was_released = false;
  const auto fetch_all = [&](bool may_release) {
    left.clear();
    for (size_t begin = 0; begin < missing->size(); begin += kAheadAtATime) {
      const auto some = std::span<const MissingRef>(*missing).subspan(
          begin, std::min(kAheadAtATime, missing->size() - begin));
      reads.Clear();
      if (may_release && status.ok()) {
        was_released |= ReadAside(lock, some, kKeyOfMissing, &reads);
      }
      if (status.ok()) {
        status = FetchSome(some, &reads, use, &left);
      } else {
        left.insert(left.end(), some.begin(), some.end());
      }
      flush();
    }
    missing->swap(left);
  };
  fetch_all(/*may_release=*/true);
  if (was_released) fetch_all(/*may_release=*/false);
  return status;
}

template <typename Use>
Status RowCache::FetchSome(std::span<const MissingRef> some, ColdReads* reads, Use use,
                           std::vector<MissingRef>* left) {
  Status status;
  std::array<Entry*, kAheadAtATime> entries;
  for (size_t i = 0; i < some.size(); ++i) entries[i] = index_.Find(some[i].ref->key);
  if (reads->is_empty()) TouchCold(std::span(entries).first(some.size()));
  for (size_t i = 0; i < some.size(); ++i) {
    const MissingRef missing = some[i];
    Entry* entry = entries[i];
    const pool::RowRead* read = reads->Find(missing.ref->key, marks_.get());
    if (status.ok() && entry != nullptr && IsColdOfDim(*entry, missing.run->dim)) {
      status = Promote(entry, read);
    }
    if (status.ok() && HasDim(slabs_, entry, missing.run->dim)) {
      use(missing, entry);
    } else {
      left->push_back(missing);
    }
  }
  return status;
}

}  // namespace persia::store

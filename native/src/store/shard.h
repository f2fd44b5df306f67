// Shard: one internal shard of the store: a mutex and the index, rows, order and rules behind it.
//
// A training lookup makes two passes. The first finds rows, stamps them and remembers what is
// missing; the second makes room and inserts. So no row of a batch is evicted by the same batch
// unless the batch alone exceeds the capacity, and the first pass changes nothing but stamps.
//
// The calls of EmbeddingStore take the mutex themselves, once, for all the runs they are given;
// where they read rows from a pool that is not mapped, they let go of it meanwhile (cold_reads.h).
// Of the methods marked "locked" the caller holds it, or keeps all other calls out (InPlaceRows).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "pool/recovery.h"
#include "store/admission_filter.h"
#include "store/batch_plan.h"
#include "store/cache_budget.h"
#include "store/change_set.h"
#include "store/cold_reads.h"
#include "store/embedding_store.h"
#include "store/expiry.h"
#include "store/group_limits.h"
#include "store/hot_keys.h"
#include "store/row_slabs.h"
#include "store/rule_set.h"
#include "store/shard_snapshot.h"
#include "store/sign_index.h"
#include "store/tier.h"
#include "store/tier_cells.h"
#include "store/update_count.h"
#include "store/victim_queue.h"
#include "store/wanted_rows.h"

namespace persia::store {

struct LoadedRows;

// Aligned so that two shards' mutexes never share a cache line.
class alignas(64) Shard {
 public:
  // Rows come from `slab_memory`, where those in a tier are from `cell_memory`; both outlive it.
  // `growth_phase` as of SignIndex.
  Shard(uint64_t capacity, SlabMemory* slab_memory, SlabMemory* cell_memory, double growth_phase,
        bool counts_updates, RowDtype row_dtype)
      : capacity_(capacity),
        counts_updates_(counts_updates),
        format_(row_dtype),
        index_(growth_phase),
        slabs_(slab_memory, cell_memory) {}

  // Rows and reports as in EmbeddingStore; the counts are added to *report.
  Status Lookup(std::span<const Run> runs, LookupMode mode, float* rows, LookupReport* report);
  Status Update(std::span<const Run> runs, const float* gradients, UpdateReport* report);
  // Before it where there is a tier: what the pool must have room for.
  Status PrepareUpdate(std::span<const Run> runs);
  Status SetRows(std::span<const Run> runs, const float* rows);
  void AddStatsTo(StoreStats* stats) const;
  uint32_t NumUpdates(uint64_t key) const;
  uint64_t size() const;
  void Clear();
  // Of StoreLoad, in shard_load.cc. Rows go where there are more than the capacity and a quarter;
  // at the end, where there are more than the capacity.
  void BeginLoad();
  // That many rows are expected in all.
  void Reserve(uint64_t num_rows);
  Status Load(std::span<const Run> runs, const LoadedRows& rows, LookupReport* counts);
  void FinishLoad(LookupReport* counts);
  // Removes the rows that are there; of any dim.
  Status RemoveRows(std::span<const Run> runs);
  // EmbeddingStore::RemoveSmallRows for at most `max_rows` rows from the key *next on; false:
  // there are no more. Adds to *num_removed.
  StatusOr<bool> RemoveSmallRows(size_t max_rows, uint64_t* next, uint64_t* num_removed);

  // Of tiers, in shard_tier.cc. From now on, while there are no rows, at most so many (and a
  // sixteenth) are in memory after a call, and the others in the tier. Of those that are announced
  // (FetchAhead), the last `num_wanted` stay longer.
  void SetTier(Tier* tier, CacheBudget cache, uint64_t num_wanted);
  // A row that was there at the tier's last checkpoint. FinishRecovery() comes behind all of them.
  Status AddRecovered(const pool::RecoveredRow& row);
  Status FinishRecovery();
  // For the keeper: some tens of rows at a time; false: there is no more to do.
  StatusOr<bool> ShrinkCache();
  // After it, from the key *next on: of a cache of bytes, memory that rows have left goes back.
  // Rows that are in its way are moved, some tens at a time. kLater: it was done just now.
  enum class GiveBack { kNothing, kMore, kLater };
  GiveBack GiveBackMemory(uint64_t* next);
  // Rows that changed up to the batch, from the key *next on.
  StatusOr<bool> WriteBackUpTo(uint64_t batch, uint64_t* next);
  // For the thread that reads ahead: brings the rows of some keys into memory. Rows that are there
  // stay a while.
  Status FetchAhead(std::span<const uint64_t> keys);
  void AddTierStatsTo(TierStats* stats) const;

  std::mutex& mutex() const { return mutex_; }
  uint64_t capacity() const { return capacity_; }
  // While there are rows the new rules must have the shapes of the old ones.
  // `num_filter_cells` are for counting sightings; 0 where the rules do not. It is shard `number`
  // of `num_shards`.
  void SetRules(std::shared_ptr<const RuleSet> rules, uint64_t num_filter_cells, uint32_t number,
                uint32_t num_shards);
  // Locked; null before the first configuration.
  const RuleSet* rules() const { return rules_.get(); }

  // Locked, all that follow. Rows touched from now on are newer than all others.
  void BeginBatch();
  uint32_t now() const { return now_; }
  const SignIndex& index() const { return index_; }
  const RowSlabs& slabs() const { return slabs_; }
  // Changes whenever a row is removed: until then every row is where it was.
  uint64_t num_removals() const { return num_removals_; }
  // Whether the key, which has no row of the dim asked for, gets one now: one with a row of another
  // dim was admitted before. Counts as a sighting of the key.
  bool Admit(uint64_t key);
  // Evicts as many rows as inserting `num_new` needs, the oldest first. With `keep_batch` it stops,
  // and returns false, where rows of the present batch would have to go. Fails as Remove().
  StatusOr<bool> MakeRoom(uint64_t num_new, bool keep_batch, LookupReport* counts);
  // The same for feature groups with a capacity, of the keys since the last call. Before
  // MakeRoom(): what goes here leaves room there.
  void ExpectInsert(uint64_t key) { limits_.Expect(key); }
  StatusOr<bool> MakeRoomInGroups(bool keep_batch, LookupReport* counts);
  // The slot of a new row for a key that has none: its values and state are initial. Where the
  // shard is full the oldest row goes. kNoSlot when there is no memory.
  uint32_t Insert(uint64_t key, uint32_t dim, LookupReport* counts);
  // kResourceExhausted: a checkpoint wants the row, and the pool has no room for it; it stays.
  Status Remove(SignIndex::Entry* entry);
  // The key's entry, or null; a row of another dim goes. *status becomes why it could not.
  SignIndex::Entry* RemoveOfAnotherDim(uint64_t key, uint32_t dim, Status* status);
  bool HasDim(const SignIndex::Entry* entry, uint32_t dim) const {
    return entry != nullptr && slabs_.dim(entry->slot) == dim;
  }
  Status OutOfMemory() const;
  // Null: there is none. Rows are then saved before they change.
  ShardSnapshot* snapshot() const { return snapshot_; }
  void set_snapshot(ShardSnapshot* snapshot) { snapshot_ = snapshot; }
  // Null: changes are not tracked. Where rows are changed, made or removed is noted there.
  void set_changes(ChangeSet* changes) { changes_ = changes; }
  // Adds to the totals that AddStatsTo() reports.
  void CountLookups(const LookupReport& counts);
  void CountUpdates(const UpdateReport& counts);

 private:
  struct Missing {
    const Run* run;
    const RowRef* ref;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Calls use(ref, entry) for each row of the run in order, the entry being null where there is no
  // row of the run's dim. `row_floats` of memory are wanted of each row.
  template <typename Use>
  void ForEachRow(const Run& run, size_t row_floats, Use use) const;

  size_t StrideOf(const Run& run) const;
  Status LookupForInference(Lock* lock, const Run& run, float* rows, LookupReport* counts);
  Status LookupForTraining(Lock* lock, std::span<const Run> runs, float* rows,
                           LookupReport* counts);
  // The two passes: use(ref, slot) for the rows that are there, the others go to missing_; then
  // use(run, ref, slot) for those, inserted. The second is false when there is no memory.
  template <typename Use>
  void UseFound(const Run& run, Use use);
  template <typename Use>
  Status InsertMissing(Use use, LookupReport* counts);
  // Between the two: of missing_, the rows that the tier has come into the cache and are used.
  // Other calls may come in between.
  template <typename Use>
  Status UseCold(Lock* lock, Use use);
  // The same of some of them; calls pass(missing) for those that it has not.
  template <typename Use, typename Pass>
  Status UseColdOf(std::span<const Missing> some, ColdReads* reads, Use use, Pass pass);
  Status CopyColdOf(Lock* lock, std::span<const Missing> some, float* rows, uint64_t* num_missing);
  void ClearLocked();
  // An uninitialised row of a key that has none; kNoSlot when there is no memory.
  uint32_t AllocateRow(uint64_t key, uint32_t dim, uint32_t stamp);
  void BeginCount(uint32_t slot) {
    if (counts_updates_) SetUpdateCount(slabs_.values(slot), slabs_.shape(slot), 0);
  }
  void TouchHomes(std::span<const RowRef> refs) const;
  // Whether a row that is in memory may change now; *status becomes why not.
  bool MayChange(uint64_t key, uint32_t slot, Status* status) {
    if (tier_ == nullptr) [[likely]]
      return true;
    if (status->ok()) *status = BeforeChange(key, slot);
    return status->ok();
  }
  void LoadState(const LoadedRows& rows, const RowRef& ref, const RowView& row) const;
  Status RemoveVictim(SignIndex::Entry* entry);
  Status Trim(LookupReport* counts);
  void RemoveExpired();
  void ForgetVictims();
  void ForgetOldest();

  // In shard_tier.cc. What a row in memory consists of.
  RowShape ShapeOf(uint64_t key, uint32_t dim) const;
  bool IsColdOfDim(const SignIndex::Entry& entry, uint32_t dim) const;
  // Reads what is not in `read`, which may be null.
  Status Promote(SignIndex::Entry* entry, const ColdReads::Row* read = nullptr);
  // Whether `read`, which may be null, is what the pool has of a cold row.
  bool IsOf(const SignIndex::Entry& entry, const ColdReads::Row* read) const;
  // Reads the cold rows of some keys, key_of(item). Where that may take long, and so the mutex is
  // let go of in between, it returns true: entries and missing_ are others then.
  template <typename Items, typename KeyOf>
  bool ReadAside(Lock* lock, const Items& items, KeyOf key_of, ColdReads* reads) const;
  // What writing the next rows that leave the cache needs of the pool.
  void BringOldestNear(Lock* lock);
  // Before that, of many; null where there is none.
  void TouchCold(std::span<SignIndex::Entry* const> entries) const;
  // A row is in memory from now on.
  void NoteHot(uint64_t key, uint32_t slot);
  void DropColdKeys();
  void CollectColdest();
  Status Demote(size_t count);
  Status DemoteRows(std::span<SignIndex::Entry* const> entries);
  // Of the rows that were just loaded, as many as the cache has too many.
  Status DemoteLoaded(std::span<const Run> runs);
  Status WriteBack(std::span<SignIndex::Entry* const> entries);
  // kCorruption: the row was not made by the rules.
  Status CheckShape(const pool::RowHead& head) const;
  // kInvalidArgument: a new row of that dim would be too large for the pool.
  Status CheckFits(uint64_t key, uint32_t dim) const;
  double SquaredNormOf(const SignIndex::Entry& entry) const;
  Status CopyCold(const SignIndex::Entry& entry, uint32_t dim, float* out) const;
  // What a checkpoint wants of the row is written.
  Status WriteForCheckpoint(uint64_t key, uint32_t slot);
  // Of rows in memory, before their turn: what it reads of them and of the pool.
  void TouchForWrite(std::span<SignIndex::Entry* const> entries) const;
  // Of a row in memory: the same as WriteForCheckpoint(), and its values are new from now.
  Status BeforeChange(uint64_t key, uint32_t slot);
  // Behind WriteForCheckpoint().
  Status RemoveFromTier(const SignIndex::Entry& entry);
  // At the end of a call that brought rows into memory.
  Status LimitCache();
  Status MakeUpForWhatCame();
  // What there is in memory beside rows, before the cache's size is judged.
  void MeasureCache();
  // Of slabs that can leave, how many bytes should.
  uint64_t ExcessOfSlabs() const;
  // Before the mutex is let go of: the rows among them that are in the pool are used now.
  void KeepFromEviction(std::span<const Missing> some);
  // To another slot of its shape; false: there is none.
  bool MoveRow(SignIndex::Entry* entry);

  mutable std::mutex mutex_;
  const uint64_t capacity_;
  const bool counts_updates_;
  const RowFormat format_;
  SignIndex index_;
  RowSlabs slabs_;
  VictimQueue victims_;
  uint32_t now_ = 0;
  uint64_t num_removals_ = 0;
  // Null before the first configuration: then there are no rows.
  std::shared_ptr<const RuleSet> rules_;
  AdmissionFilter filter_;
  Expiry expiry_;
  GroupLimits limits_;
  std::vector<Missing> missing_;  // of the call in progress
  ShardSnapshot* snapshot_ = nullptr;
  ChangeSet* changes_ = nullptr;
  Tier* tier_ = nullptr;     // null: all rows are in memory, and what follows is not used
  CacheBudget hot_;          // the rows in memory
  uint64_t num_came_ = 0;    // rows into memory since the cache's size was judged
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
  VictimQueue coldest_;
  WantedRows wanted_;
  std::unique_ptr<RowMarks> marks_;  // null: the pool is mapped memory
  LookupReport lookups_;
  UpdateReport updates_;
};

template <typename Items, typename KeyOf>
bool Shard::ReadAside(Lock* lock, const Items& items, KeyOf key_of, ColdReads* reads) const {
  if (marks_ == nullptr) return false;
  for (const auto& item : items) {
    const SignIndex::Entry* entry = index_.Find(key_of(item));
    if (entry == nullptr || !IsCold(slabs_, entry->slot)) continue;
    reads->Add(entry->key, ColdCellOf(slabs_, entry->slot), marks_->Of(entry->key));
  }
  if (reads->is_empty()) return false;
  lock->unlock();
  reads->ReadFrom(tier_->pool());
  lock->lock();
  return true;
}

// *total += counts
void Add(const LookupReport& counts, LookupReport* total);
void Add(const UpdateReport& counts, UpdateReport* total);

}  // namespace persia::store

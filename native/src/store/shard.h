// Shard: one internal shard of the store: a mutex and the rows behind it (row_table.h), with the
// features that attach to them (row_features.h) and, where there is a storage tier, the cache of
// resident rows (row_cache.h).
//
// A training lookup makes two passes. The first finds rows, stamps them and remembers what is
// missing; the second makes room and inserts. So no row of a batch is evicted by the same batch
// unless the batch alone exceeds the capacity, and the first pass changes nothing but stamps.
//
// Calls take the mutex once, for all the runs they are given; where they read rows from a tier that
// is not mapped memory, they release it meanwhile (cold_reads.h). Methods marked "locked" expect
// the caller to hold it, or the store exclusively (InPlaceRows).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "pool/recovery.h"
#include "store/batch_plan.h"
#include "store/embedding_store.h"
#include "store/row_cache.h"
#include "store/row_features.h"
#include "store/row_table.h"

namespace persia::store {

struct LoadedRows;

// Aligned so that two shards' mutexes never share a cache line.
class alignas(64) Shard {
 public:
  // Rows are allocated from `slab_memory`, cold rows' cells from `cell_memory`; both outlive it.
  // `growth_phase` as SignIndex's.
  Shard(uint64_t capacity, SlabMemory* slab_memory, SlabMemory* cell_memory, double growth_phase,
        bool counts_updates, RowDtype row_dtype);

  // Rows and reports as in EmbeddingStore; the counts are added to *report.
  Status Lookup(std::span<const Run> runs, LookupMode mode, float* rows, LookupReport* report);
  Status Update(std::span<const Run> runs, const float* gradients, UpdateReport* report);
  // Before Update() where there is a cache: writes what a pending checkpoint needs of the rows.
  Status PrepareUpdate(std::span<const Run> runs);
  Status SetRows(std::span<const Run> runs, const float* rows);
  void AddStatsTo(StoreStats* stats) const;
  uint32_t NumUpdates(uint64_t key) const;
  uint64_t size() const;
  void Clear();

  // StoreLoad's, in shard_load.cc. A shard may exceed its capacity by a quarter until FinishLoad().
  void BeginLoad();
  // That many rows are expected in all.
  void Reserve(uint64_t num_rows);
  Status Load(std::span<const Run> runs, const LoadedRows& rows, LookupReport* counts);
  Status FinishLoad(LookupReport* counts);
  // Removes existing rows of the runs' keys, of any dim.
  Status RemoveRows(std::span<const Run> runs);
  // EmbeddingStore::RemoveSmallRows for at most `max_rows` rows from the key *next on; false: no
  // more are left. Adds to *num_removed.
  StatusOr<bool> RemoveSmallRows(size_t max_rows, uint64_t* next, uint64_t* num_removed);

  // A row of a tier's last checkpoint, before SetTier(); FinishLoad() follows the last one.
  // kCorruption: the row was not made by the shard's policies.
  Status AddRecovered(const pool::RecoveredRow& row);
  // Before all rows but recovered ones. `tier` outlives the shard.
  void SetTier(Tier* tier, CacheBudget budget, uint64_t num_pinned);
  // Null: there is no tier.
  RowCache* cache() const { return cache_.get(); }

  // While there are rows the new policies must have the shapes of the old ones.
  // `num_filter_cells` are for counting sightings; 0 where the policies do not. It is shard
  // `number` of `num_shards`.
  void SetPolicies(std::shared_ptr<const RowPolicies> policies, uint64_t num_filter_cells,
                   uint32_t number, uint32_t num_shards);

  std::mutex& mutex() const { return mutex_; }
  // Locked, all that follow.
  const ShardTable& table() const { return table_; }
  RowFeatures& features() { return features_; }
  // Rows touched from now on are newer than all others. Removes rows that have expired.
  void BeginBatch();
  // Whether the key, which has no row of the dim asked for, gets one now: one with a row of another
  // dim was admitted before. Counts as a sighting of the key.
  bool Admit(uint64_t key);
  // Evicts the oldest rows until all keys, which have none, can be inserted: first within feature
  // groups with a capacity, whose rows leave room for others. With `keep_batch` it does not evict
  // rows of the present batch, and says what is full of them. Fails as RowTable::Remove().
  enum class Room { kEnough, kGroupIsFull, kShardIsFull };
  StatusOr<Room> MakeRoom(std::span<const uint64_t> keys, bool keep_batch, LookupReport* counts);
  // The cell of a new row for a key that has none. Evicts as MakeRoom() does for one key.
  // RowTable::kNoCell: there is no memory.
  uint32_t Insert(uint64_t key, uint32_t dim, LookupReport* counts);
  // Adds to the totals that AddStatsTo() reports.
  void CountLookups(const LookupReport& counts);
  void CountUpdates(const UpdateReport& counts);
  ShardTable& table() { return table_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Entry = SignIndex::Entry;
  using MissingRefs = std::vector<MissingRef>;

  Status LookupForInference(Lock* lock, std::span<const Run> runs, float* rows,
                            LookupReport* counts);
  Status LookupForTraining(Lock* lock, std::span<const Run> runs, float* rows,
                           LookupReport* counts);
  // The passes of a training call: use(run, ref, cell) for rows that exist, with stamps of now; all
  // others are left in *missing. Counts hits and misses of the cache.
  template <typename Use>
  Status UseExisting(Lock* lock, std::span<const Run> runs, MissingRefs* missing, Use use);
  // The same for *missing, with rows inserted.
  template <typename Use>
  Status InsertMissing(const MissingRefs& missing, Use use, LookupReport* counts);
  void UpdateRun(Lock* lock, const Run& run, const float* gradients, UpdateReport* counts,
                 Status* status);
  StatusOr<bool> MakeRoomInGroups(bool keep_batch, LookupReport* counts);
  size_t StrideOf(const Run& run) const;
  void ForgetVictims();
  void RemoveExpired();
  void LoadState(const LoadedRows& rows, const RowRef& ref, const RowView& row) const;
  Status LoadRow(const LoadedRows& rows, const Run& run, const RowRef& ref, ChangeBatch* changed,
                 LookupReport* counts);
  Status Trim(LookupReport* counts);
  double SquaredNormOf(const Entry& entry) const;

  mutable std::mutex mutex_;
  const RowFormat format_;
  RowFeatures features_;
  ShardTable table_;
  std::unique_ptr<RowCache> cache_;
  LookupReport lookups_;
  UpdateReport updates_;
};

// *total += counts
void Add(const LookupReport& counts, LookupReport* total);
void Add(const UpdateReport& counts, UpdateReport* total);

}  // namespace persia::store

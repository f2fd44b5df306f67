// Shard: one internal shard of the store: a mutex and the rows behind it (row_table.h), with the
// features that attach to them (row_features.h) and, where there is a storage tier, the cache of
// resident rows (row_cache.h).
//
// A training lookup makes two passes. The first finds rows, stamps them and remembers what is
// missing; the second makes room and inserts. So no row of a batch is evicted by the same batch
// unless the batch alone exceeds the capacity, and the first pass changes nothing but stamps.
//
// Calls take the mutex once, for all the runs they are given; where they read rows from a tier that
// is not mapped memory, they release it meanwhile (cold_rows.h). Methods marked "locked" expect
// the caller to hold it, or the store exclusively (InPlaceRows).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/row_cache.h"
#include "store/row_features.h"
#include "store/row_table.h"
#include "store/types.h"

namespace persia::store {

// Since the store was made. Guarded like the shard's rows.
struct ShardTotals {
  LookupReport lookups;
  UpdateReport updates;
};

// Aligned so that two shards' mutexes never share a cache line.
class alignas(64) Shard {
 public:
  // Rows are allocated from `slab_memory`, cold rows' cells from `cold_memory`; both outlive it.
  // `growth_phase` as SignIndex's.
  Shard(uint64_t capacity, SlabMemory* slab_memory, SlabMemory* cold_memory, double growth_phase,
        bool counts_updates, RowDtype row_dtype);

  // Rows and reports as in EmbeddingStore; the counts are added to *report.
  // `found`: a lookup for training fills it, its update is given it; null: the update searches.
  Status Lookup(std::span<const Run> runs, LookupMode mode, float* rows, LookupReport* report,
                FoundCells* found = nullptr);
  Status Update(std::span<const Run> runs, const float* gradients, UpdateReport* report,
                const FoundCells* found = nullptr);
  Status SetRows(std::span<const Run> runs, const float* rows);
  void AddStatsTo(StoreStats* stats) const;
  uint64_t size() const;
  // As RowTable::Clear().
  void Clear(const std::shared_ptr<RowArrays>& arrays);

  // While there are rows, the new policies must have the shapes of the old ones. `num_filter_cells`
  // are for counting sightings; 0 where the policies do not. It is shard `number` of `num_shards`.
  // Without rows, it is cleared with `arrays`.
  void SetPolicies(std::shared_ptr<const RowPolicies> policies, uint64_t num_filter_cells,
                   const std::shared_ptr<RowArrays>& arrays, uint32_t number, uint32_t num_shards);
  // Before all rows but recovered ones. `tier` is not used after the shard's last call.
  void SetTier(StoreTier* tier, CacheBudget budget, uint64_t num_pinned);
  // Null: there is no tier.
  RowCache* cache() const { return cache_.get(); }

  std::mutex& mutex() const { return mutex_; }
  // Locked, all that follow.
  const ShardTable& table() const { return table_; }
  ShardTable& table() { return table_; }
  const RowFormat& format() const { return format_; }
  RowFeatures& features() { return features_; }
  // What AddStatsTo() reports, for callers that work on the table themselves.
  ShardTotals& totals() { return totals_; }
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
  // Evicts what is beyond the capacity. Fails as MakeRoom().
  Status Trim(LookupReport* counts);
  // To be called where rows were inserted or removed behind the order's back: it is found anew.
  void ForgetVictims();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Entry = SignIndex::Entry;
  using MissingRefs = std::vector<MissingRef>;

  // Under the mutex, which a tier's reads may release meanwhile.
  Status LookupForInference(Lock* lock, std::span<const Run> runs, float* rows,
                            LookupReport* counts);
  Status LookupForTraining(Lock* lock, std::span<const Run> runs, float* rows, LookupReport* counts,
                           FoundCells* found);
  // The passes of a training call: use(run, ref, cell) for rows that exist, with stamps of now; all
  // others are left in *missing. Counts hits and misses of the cache.
  template <typename Use>
  Status UseExisting(Lock* lock, std::span<const Run> runs, MissingRefs* missing, Use use);
  // The same for *missing, with rows inserted.
  template <typename Use>
  Status InsertMissing(const MissingRefs& missing, Use use, LookupReport* counts);
  void UpdateRun(Lock* lock, const Run& run, const float* gradients, UpdateReport* counts,
                 Status* status);
  // The same for rows whose cells are known.
  void UpdateFound(const Run& run, std::span<const uint32_t> cells, const float* gradients,
                   UpdateReport* counts);
  StatusOr<bool> MakeRoomInGroups(bool keep_batch, LookupReport* counts);
  // Floats to prefetch for each row of the run, with its state.
  size_t StrideOf(const Run& run) const;
  void RemoveExpired();

  mutable std::mutex mutex_;
  const RowFormat format_;
  RowFeatures features_;
  ShardTable table_;
  std::unique_ptr<RowCache> cache_;
  ShardTotals totals_;
};

}  // namespace persia::store

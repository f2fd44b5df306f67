// Shard: one internal shard of the store: a mutex and the index, rows, order and rules behind it.
//
// Every method but the few marked "locked" takes the
// mutex itself, once, for all the runs it is given.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "base/status.h"
#include "store/batch_plan.h"
#include "store/embedding_store.h"
#include "store/lru_list.h"
#include "store/row_rules.h"
#include "store/row_slabs.h"
#include "store/sign_index.h"

namespace persia::store {

// Aligned so that two shards' mutexes never share a cache line.
class alignas(64) Shard {
 public:
  explicit Shard(uint64_t capacity) : capacity_(capacity), lru_(slabs_) {}

  // Rows and reports as in EmbeddingStore; the counts are added to *report.
  Status Lookup(std::span<const Run> runs, LookupMode mode, float* rows, LookupReport* report);
  void Update(std::span<const Run> runs, const float* gradients, UpdateReport* report);
  Status SetRows(std::span<const Run> runs, const float* rows);
  void AddStatsTo(StoreStats* stats) const;
  uint64_t size() const;
  void Clear();

  std::mutex& mutex() const { return mutex_; }
  bool IsEmptyLocked() const { return index_.size() == 0; }
  // Locked. While there are rows the new rules must have the shapes of the old ones.
  void SetRulesLocked(std::shared_ptr<const RowRules> rules);

 private:
  enum class Access { kRead, kTouch, kWrite };

  // Calls handle(ref, slot) for each row of the run in order, with its slot or kNoSlot, prefetching
  // ahead; handle returns false to stop.
  template <Access access, typename Handle>
  bool ForEachRow(const Run& run, Handle handle);
  template <Access access>
  void PrefetchRow(uint32_t slot, size_t bytes);

  uint32_t Find(const RowRef& ref);
  void LookupForInference(const Run& run, float* rows, LookupReport* counts);
  bool LookupForTraining(const Run& run, float* rows, LookupReport* counts);
  bool SetRun(const Run& run, const float* rows, LookupReport* counts);
  // A new row, counted; where the shard is full the
  // oldest one goes. kNoSlot when there is no memory.
  uint32_t Insert(const RowRef& ref, uint32_t pool, LookupReport* counts);
  void Remove(uint32_t slot);
  Status OutOfMemory() const;
  void ClearLocked();

  mutable std::mutex mutex_;
  const uint64_t capacity_;
  SignIndex index_;
  RowSlabs slabs_;
  LruList lru_;
  // Null before the first configuration: then there are no rows.
  std::shared_ptr<const RowRules> rules_;
  LookupReport lookups_;
  UpdateReport updates_;
};

// *total += counts
void Add(const LookupReport& counts, LookupReport* total);
void Add(const UpdateReport& counts, UpdateReport* total);

}  // namespace persia::store

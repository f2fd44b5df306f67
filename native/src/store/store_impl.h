// EmbeddingStore::Impl: what stands behind the public class, for the files of this folder alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "pool/pool_tools.h"
#include "store/batch_plan.h"
#include "store/change_set.h"
#include "store/embedding_store.h"
#include "store/row_policies.h"
#include "store/shard.h"
#include "store/slab_memory.h"
#include "store/snapshot_budget.h"
#include "store/tier.h"
#include "store/writer_first_mutex.h"

namespace persia::store {

class EmbeddingStore::Impl {
 public:
  explicit Impl(const Options& options)
      : counts_updates_(options.counts_updates), row_dtype_(options.row_dtype) {
    const uint64_t num_shards = options.num_internal_shards;
    for (uint64_t i = 0; i < num_shards; ++i) {
      const uint64_t capacity =
          options.capacity / num_shards + (i < options.capacity % num_shards ? 1 : 0);
      const double growth_phase = static_cast<double>(i) / static_cast<double>(num_shards);
      shards_.emplace_back(capacity, &slab_memory_, &cell_memory_, growth_phase, counts_updates_,
                           row_dtype_);
    }
  }

  ~Impl() { StopThreads(); }

  // Of a tier, in store_tier.cc. Once, before all other calls.
  Status OpenTier(const TierOptions& options);
  // Null: there is none.
  Tier* tier() const { return tier_.get(); }
  // kFailedPrecondition: there is none.
  StatusOr<Tier*> RequireTier() const;
  const pool::RowPool* pool() const { return tier_ == nullptr ? nullptr : &tier_->pool(); }
  Status CheckTier() const { return tier_ == nullptr ? Status::Ok() : tier_->status(); }

  Status Configure(const TrainConfig& config, bool replace);
  // The same for a caller who has the store for himself.
  Status ConfigureAlone(const TrainConfig& config, bool replace);
  // kInvalidArgument: a group's capacity is not enough for every shard.
  Status CheckCapacities(const RowPolicies& policies) const;
  std::optional<TrainConfig> config() const {
    std::lock_guard lock(config_mutex_);
    return config_;
  }
  // Once true it stays true, and then every shard has policies.
  bool IsConfigured() const { return is_configured_.load(std::memory_order_acquire); }

  // Calls handle(shard, runs) for every shard that the request touches, and of several handles the
  // next when the one before is through; stops at the first failure. The caller is in the store.
  template <typename... Handles>
  Status ForEachShard(std::span<const RowBlock> blocks, Handles... handles);

  std::deque<Shard>& shards() { return shards_; }
  bool counts_updates() const { return counts_updates_; }
  // Held shared by the calls of EmbeddingStore; exclusively by InPlaceRows, and where all shards
  // must change at once.
  WriterFirstMutex& in_place_mutex() { return in_place_mutex_; }
  // For calls that change rows, which a snapshot may hold up for a while.
  std::shared_lock<WriterFirstMutex> EnterForChange() {
    snapshot_budget_.WaitForRoom();
    std::shared_lock lock(in_place_mutex_);
    if (tier_ != nullptr) tier_->CountBatch();  // in the store: not of a checkpoint it waited for
    return lock;
  }
  std::unique_lock<WriterFirstMutex> LockForChange() {
    snapshot_budget_.WaitForRoom();
    return std::unique_lock(in_place_mutex_);
  }

  // Of snapshots and loading, which each need all rows, there is one at a time. kFailedPrecondition
  // says what is under way.
  Status Occupy(const char* by) {
    const char* nobody = nullptr;
    if (occupied_by_.compare_exchange_strong(nobody, by)) return Status::Ok();
    return FailedPrecondition(std::string(nobody) + " of this store is under way, and so " + by +
                              " cannot begin; close it first");
  }
  void Release() { occupied_by_.store(nullptr); }
  SnapshotBudget& snapshot_budget() { return snapshot_budget_; }

  // Null: changes are not tracked. Whoever replaces them has the store for himself.
  ChangeSet* changes() const { return changes_.get(); }
  // Returns the ones of before.
  std::unique_ptr<ChangeSet> ReplaceChanges(std::unique_ptr<ChangeSet> changes) {
    changes_.swap(changes);
    for (Shard& shard : shards_) shard.features().changes = changes_.get();
    return changes;
  }
  // The caller has the store for himself where there is a tier; else he is in the store.
  Status ClearRows() {
    if (tier_ != nullptr) PERSIA_RETURN_IF_ERROR(tier_->Clear());
    if (changes_ != nullptr) changes_->NoteClear();
    for (Shard& shard : shards_) shard.Clear();
    ForgetSlabs();
    return Status::Ok();
  }

  // Update() calls that have ended; counted while the caller is in the store.
  void CountUpdate() { num_updates_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t num_updates() const { return num_updates_.load(std::memory_order_relaxed); }

  // Without what is beside the shards.
  StoreStats ShardStats() const {
    StoreStats stats;
    for (const Shard& shard : shards_) shard.AddStatsTo(&stats);
    stats.memory_bytes += slab_memory_.unused_bytes() + cell_memory_.unused_bytes();
    return stats;
  }

 private:
  // After all shards have gone without.
  void ForgetSlabs() {
    slab_memory_.Clear();
    cell_memory_.Clear();
  }
  Status OpenPool(const TierOptions& options, bool is_new);
  Status RecoverRules(const pool::PoolInfo& pool);
  // Before rows are made by them.
  Status SaveRulesIfNew(const TrainConfig& config);
  void MaintainTier();
  Status ShrinkCaches(bool* has_more_memory);
  bool GiveBackMemory(Shard* shard);
  Status AdvanceCheckpoints(uint64_t* last);
  // The other thread of a tier's.
  void FetchAhead();
  void FetchAhead(uint32_t shard, std::span<const uint64_t> keys);
  void StopThreads();

  const bool counts_updates_;
  const RowDtype row_dtype_;
  SlabMemory slab_memory_;
  SlabMemory cell_memory_;
  std::deque<Shard> shards_;
  WriterFirstMutex in_place_mutex_;  // taken before all others
  SnapshotBudget snapshot_budget_;
  std::unique_ptr<ChangeSet> changes_;
  std::atomic<const char*> occupied_by_ = nullptr;
  std::atomic<uint64_t> num_updates_ = 0;
  mutable std::mutex config_mutex_;  // taken before any shard's
  std::optional<TrainConfig> config_;
  bool is_config_recovered_ = false;  // it is no script's; a script may have another
  std::atomic<bool> is_configured_ = false;
  std::atomic<uint32_t> next_first_shard_ = 0;
  std::unique_ptr<Tier> tier_;
  std::string tier_directory_;
  std::optional<TrainConfig> saved_rules_;  // guarded like config_
  std::thread maintenance_thread_;
  std::thread prefetch_thread_;
};

template <typename... Handles>
Status EmbeddingStore::Impl::ForEachShard(std::span<const RowBlock> blocks, Handles... handles) {
  BatchPlan& plan = BatchPlan::OfThread();
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  PERSIA_RETURN_IF_ERROR(plan.Build(blocks, num_shards));
  // Each call starts elsewhere, so that calls at the same time do not queue up at every shard.
  const uint32_t first = next_first_shard_.fetch_add(1, std::memory_order_relaxed) % num_shards;
  const auto pass = [&](const auto& handle) {
    for (uint32_t i = 0; i < num_shards; ++i) {
      const uint32_t shard = (first + i) % num_shards;
      if (plan.IsEmpty(shard)) continue;
      PERSIA_RETURN_IF_ERROR(handle(shards_[shard], plan.RunsOf(shard)));
    }
    return Status::Ok();
  };
  Status status;
  static_cast<void>(((status = pass(handles)).ok() && ...));
  if (tier_ != nullptr) tier_->WakeIfOverBudget();
  return status;
}

}  // namespace persia::store

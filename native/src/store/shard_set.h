// ShardSet: the internal shards of a store, with what they share: memory, the store's lock, the
// train config, and the features that concern all shards at once.
//
// EmbeddingStore is the interface for users; this is the one for the files of this folder that act
// on a whole store: StoreSnapshot, StoreLoad, StoreTier and InPlaceRows.
//
// Locks, in the order in which they are taken:
//  1. mutex(): shared by every call that uses rows, exclusive where all shards must change at once
//     (a snapshot point, a configuration, InPlaceRows). "Locked" below means held exclusively.
//  2. the config's, private.
//  3. a shard's own. No call holds two shards' mutexes.
//  Those of the tier, of reading ahead and of a snapshot's budget are taken last.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "store/change_set.h"
#include "store/row_arrays.h"
#include "store/row_policy.h"
#include "store/shard.h"
#include "store/signs_by_shard.h"
#include "store/slab_memory.h"
#include "store/snapshot_budget.h"
#include "store/store_tier.h"
#include "store/types.h"

namespace persia::store {

// A shared mutex whose exclusive owners do not wait for readers that arrive later.
//
// std::shared_mutex may admit readers for ever while an exclusive lock is wanted. The calls of a
// busy store overlap all the time, so no snapshot point through all of them would ever be reached.
//
// For std::unique_lock and std::shared_lock. Not recursive.
class WriterFirstMutex {
 public:
  void lock() {
    num_writers_.fetch_add(1);
    {
      // Held until the earlier readers have left; new ones queue up here.
      const std::lock_guard turn(turn_);
      mutex_.lock();
    }
    num_writers_.fetch_sub(1);
  }
  void unlock() { mutex_.unlock(); }

  void lock_shared() {
    if (num_writers_.load(std::memory_order_relaxed) != 0) [[unlikely]] {
      const std::lock_guard turn(turn_);
    }
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::atomic<uint32_t> num_writers_ = 0;  // waiting
  std::mutex turn_;
  std::shared_mutex mutex_;
};

// What features keep once for all shards.
struct SharedFeatures {
  SnapshotBudget snapshot_budget;      // bounds the memory of rows saved for a snapshot
  std::unique_ptr<ChangeSet> changes;  // null: changes are not tracked. Replaced only when locked
  // Update() calls that have ended. Counted under the store's lock, so that a snapshot point has a
  // number of whole updates.
  std::atomic<uint64_t> num_updates = 0;

  // Snapshots and loading each need all rows, so only one of them runs at a time.
  // kFailedPrecondition names the one that does. Each success is followed by one Release().
  Status Occupy(const char* by);
  void Release() { occupied_by_.store(nullptr); }

 private:
  std::atomic<const char*> occupied_by_ = nullptr;
};

class ShardSet {
 public:
  struct Options {
    uint64_t capacity = 1'000'000'000;  // rows; the least recently used is evicted first
    uint32_t num_internal_shards = 16;  // 1 .. 65536, at most `capacity`
    bool counts_updates = false;        // of each row, for NumUpdates(); not with a tier
    // The format of embeddings in memory. Callers pass and get float32, and optimizer state is
    // float32. With 16 bits, updates use stochastic rounding, all other writes round to nearest;
    // not with a tier.
    RowDtype row_dtype = RowDtype::kFloat32;
    // Feature groups whose rows are kept by ID (row_arrays.h), from the first configuration on; not
    // with a tier.
    std::vector<RowArraySpec> arrays = {};
  };

  explicit ShardSet(const Options& options);

  std::deque<Shard>& all() { return shards_; }
  const std::deque<Shard>& all() const { return shards_; }
  uint32_t count() const { return static_cast<uint32_t>(shards_.size()); }
  bool counts_updates() const { return options_.counts_updates; }
  RowArrays& arrays() { return *arrays_; }
  SharedFeatures& features() { return features_; }
  const SharedFeatures& features() const { return features_; }

  // Calls handle(shard, runs), or handle(shard, its number, runs), for every shard that the request
  // touches. With several handles, each passes over all shards before the next one starts. Stops at
  // the first failure. The caller holds mutex(), shared or exclusively.
  template <typename... Handles>
  Status ForEach(std::span<const RowBlock> blocks, Handles... handles) {
    SignsByShard& signs = SignsByShard::OfThread();
    PERSIA_RETURN_IF_ERROR(signs.Build(blocks, count()));
    return ForEachOf(&signs, handles...);
  }
  // The same for a request that was grouped before.
  template <typename... Handles>
  Status ForEachOf(SignsByShard* signs, Handles... handles);

  WriterFirstMutex& mutex() const { return mutex_; }
  // Locks for calls that change rows. They wait while a snapshot's memory is full, before they take
  // the lock, which the snapshot's reader needs to catch up.
  std::shared_lock<WriterFirstMutex> EnterForChange();
  std::unique_lock<WriterFirstMutex> LockForChange();

  // Locked. EmbeddingStore::Configure. A config that is `recovered` from a tier was not asked for
  // by a script, so the first script may replace it.
  Status Configure(const TrainConfig& config, bool replace, bool is_recovered = false);
  std::optional<TrainConfig> config() const;
  // Once true it stays true, and then every shard has policies.
  bool IsConfigured() const { return is_configured_.load(std::memory_order_acquire); }
  // kInvalidArgument: a group's capacity is not enough for every shard.
  Status CheckCapacities(const RowPolicies& policies) const;

  // Locked. Returns the former changes.
  std::unique_ptr<ChangeSet> ReplaceChanges(std::unique_ptr<ChangeSet> changes);
  // Whether Clear() needs the exclusive lock.
  bool ClearsAtOnce() const { return tier_ != nullptr || !options_.arrays.empty(); }
  // Removes all rows. Locked if ClearsAtOnce(); otherwise a shared lock is enough.
  Status Clear();
  // How often rows were set, loaded or cleared; noted after the change, so that who reads the count
  // and then rows has no newer count than rows.
  uint64_t num_replacements() const { return num_replacements_.load(std::memory_order_acquire); }
  void NoteReplacement() { num_replacements_.fetch_add(1, std::memory_order_release); }
  // Without what features and tier hold outside the shards.
  StoreStats Stats() const;

  // Null: there is no tier. StoreTier attaches one before the first call on the store.
  StoreTier* tier() const { return tier_; }
  void AttachTier(StoreTier* tier) { tier_ = tier; }
  // What stopped the tier for good, which every call reports from then on.
  Status CheckTier() const { return tier_ == nullptr ? Status::Ok() : tier_->status(); }

 private:
  // Arrays without rows for the policies' shapes. kResourceExhausted: no addresses for them.
  StatusOr<std::shared_ptr<RowArrays>> MakeArrays(const RowPolicies& policies) const;
  // After all shards have gone without rows; some may have new ones since. What is free goes back
  // to the system.
  void ForgetSlabs();

  const Options options_;
  SlabMemory slab_memory_;
  SlabMemory cold_memory_;
  std::shared_ptr<RowArrays> arrays_ = std::make_shared<RowArrays>();  // replaced only when locked
  std::deque<Shard> shards_;
  mutable WriterFirstMutex mutex_;
  SharedFeatures features_;
  mutable std::mutex config_mutex_;
  std::optional<TrainConfig> config_;
  bool is_config_recovered_ = false;
  std::atomic<bool> is_configured_ = false;
  std::atomic<uint32_t> next_first_shard_ = 0;
  std::atomic<uint64_t> num_replacements_ = 0;
  StoreTier* tier_ = nullptr;
};

template <typename... Handles>
Status ShardSet::ForEachOf(SignsByShard* signs, Handles... handles) {
  // Each call starts at another shard, so that concurrent calls do not queue up at every one.
  const uint32_t first = next_first_shard_.fetch_add(1, std::memory_order_relaxed) % count();
  const auto pass = [&](const auto& handle) {
    for (uint32_t i = 0; i < count(); ++i) {
      const uint32_t shard = (first + i) % count();
      if (signs->IsEmpty(shard)) continue;
      if constexpr (std::is_invocable_v<decltype(handle), Shard&, std::span<const Run>>) {
        PERSIA_RETURN_IF_ERROR(handle(shards_[shard], signs->RunsOf(shard)));
      } else {
        PERSIA_RETURN_IF_ERROR(handle(shards_[shard], shard, signs->RunsOf(shard)));
      }
    }
    return Status::Ok();
  };
  Status status;
  static_cast<void>(((status = pass(handles)).ok() && ...));
  if (tier_ != nullptr) tier_->WakeIfOverBudget();
  return status;
}

}  // namespace persia::store

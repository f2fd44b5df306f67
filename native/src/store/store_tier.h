// StoreTier: the storage beneath a store (pool/row_pool.h): recovery, checkpoints, prefetch hints,
// and the two threads that maintain it.
//
// A store's index knows all rows. Resident rows have cells in slabs like the rows of a store
// without a tier; cold rows are stored in the tier alone. A training call promotes the cold rows
// that it names into the cache of its shard (row_cache.h), which may exceed its budget by a
// sixteenth; the maintenance thread demotes the least recently used rows until the budget holds. A
// second thread promotes rows that prefetch hints name.
//
// Batches are counted from the tier's last checkpoint on; that number is a row's version. A
// checkpoint is the state that the store returns to after a crash. Beginning one writes nothing: a
// row that changed up to it and that the tier lacks is written before it changes again; the
// maintenance thread writes the others, then commits. Where there is no room for that it tries
// again, and reports so.
//
// Every store has one; it is closed unless EmbeddingStore::Open() opened it. Thread-safe once open.
// Locks: its mutex is taken after the store's and after a shard's, and never held while the device
// works.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "pool/pool_tools.h"
#include "pool/row_pool.h"
#include "store/types.h"

namespace persia::store {

class Shard;
class ShardSet;

// Signs of prefetch hints, between the calls that name them and the thread that makes their rows
// resident.
//
// Bounded: what has no room is dropped. The lookup then reads these rows itself. Thread-safe.
class ReadAhead {
 public:
  explicit ReadAhead(size_t max_signs) : max_signs_(max_signs) {}

  // Those behind the first that have room are dropped.
  void Add(std::span<const uint64_t> signs);
  // Waits for the oldest that were added. False: Stop() was called.
  bool Take(std::vector<uint64_t>* signs);
  void Stop();

  uint64_t num_dropped() const;
  uint64_t memory_bytes() const;

 private:
  const size_t max_signs_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<std::vector<uint64_t>> waiting_;  // by call
  size_t num_waiting_ = 0;
  uint64_t num_dropped_ = 0;
  bool is_stopping_ = false;
};

class StoreTier {
 public:
  // Closed. `shards` outlives it.
  explicit StoreTier(ShardSet* shards) : shards_(*shards) {}
  ~StoreTier();  // ends the threads; what is not committed then is lost
  StoreTier(const StoreTier&) = delete;
  StoreTier& operator=(const StoreTier&) = delete;

  // Opens the directory's tier, or makes one. Once, before all other calls on the store.
  // EmbeddingStore::Open's errors.
  Status Open(const TierOptions& options);

  // For users of the store. Where it is closed, those of checkpoints fail with kFailedPrecondition,
  // hints do nothing, and there are no statistics.
  //
  // Begins a checkpoint, which fixes what it contains; it is committed in the background, when
  // stats() has it as `committed`. Returns its number; numbers rise. A `held` one is written, and
  // then it and all after it wait for CommitCheckpoint() or DropCheckpoint(); at most one is held.
  // kFailedPrecondition: there is no config; kResourceExhausted: too many are pending.
  StatusOr<uint64_t> RequestCheckpoint(bool held = false);
  // Waits until that checkpoint, or a later one, is committed. kDeadlineExceeded: it is not yet;
  // kResourceExhausted: there is no room for it, and the store keeps trying; kFailedPrecondition:
  // no such checkpoint was requested, or the rows were cleared since.
  Status WaitCheckpoint(uint64_t number, std::chrono::milliseconds timeout) const;
  // What the held checkpoint will commit; nothing before all of it is written. What keeps it from
  // being written, such as kResourceExhausted; kFailedPrecondition: it is not held (any more).
  StatusOr<std::optional<pool::PreparedCheckpoint>> PreparedCheckpoint(uint64_t number) const;
  // Training goes on while the device commits. kFailedPrecondition: it is not held, or not
  // prepared.
  Status CommitCheckpoint(uint64_t number);
  // Gives the held checkpoint up: the one before it stays the state to return to.
  Status DropCheckpoint(uint64_t number);
  // A hint that the next training lookups name these signs: a thread makes their rows resident, in
  // the order of the calls; returns at once. Changes neither rows nor the order of eviction. Where
  // more signs wait than half the cache has rows, the rest is dropped.
  void Prefetch(std::span<const uint64_t> signs);
  // Whether hints are worth a message: cold rows are read from a file. From a mapped tier the
  // lookup itself reads them as fast.
  bool WantsPrefetch() const;
  std::optional<TierStats> stats() const;

  // For the shards and the store, while it is open.
  pool::RowPool& pool() const { return *pool_; }
  uint64_t memory_bytes() const;
  // The version of what changes now. It never falls: read with a shard locked, a row's versions
  // rise.
  uint64_t batch() const { return batch_.load(std::memory_order_relaxed); }
  void CountBatch() { batch_.fetch_add(1, std::memory_order_relaxed); }
  // Saves the config beside the pool unless rows of the saved one could have been made by it: a
  // learning rate may change with every batch. Not thread-safe: the store's config lock is held.
  Status SaveConfigIfNew(const TrainConfig& config);
  // Removes all rows and checkpoints. The caller holds the store exclusively.
  Status Clear();
  // Stops the tier for what failed where no caller could be told: from then on status() returns it,
  // and with it all calls fail. The pool's last checkpoint is what remains. A lack of room is no
  // failure: whoever needs some is told.
  void Fail(const Status& status);
  Status status() const;
  // A cache is getting full: the maintenance thread is woken when the call is through with all
  // shards, for it needs the same ones.
  void MarkOverBudget() { is_over_budget_.store(true, std::memory_order_relaxed); }
  void WakeIfOverBudget() {
    if (is_over_budget_.load(std::memory_order_relaxed) && is_over_budget_.exchange(false)) Wake();
  }
  // For the maintenance thread. Commits the oldest pending checkpoint, all rows of which are in the
  // pool, or prepares it if it is held. Ok where it was committed, dropped or cleared meanwhile.
  Status EndCheckpoint(uint64_t batch);

 private:
  Status CheckOpen() const;
  StatusOr<std::optional<TrainConfig>> RecoverConfig(const std::string& directory,
                                                     const pool::PoolInfo& pool);
  StatusOr<std::unique_ptr<pool::RowPool>> OpenPool(const TierOptions& options, bool is_new);

  // The prefetch thread.
  void FetchAhead();
  void FetchAhead(const Shard& shard, std::span<const uint64_t> keys);
  // The maintenance thread.
  void Maintain();
  // Calls step(), with the store's lock shared, until it returns false or an error, or the store is
  // being closed.
  template <typename Step>
  Status InSteps(Step step);
  Status ShrinkCaches(bool* has_more_memory);
  bool GiveBackMemory(const Shard& shard);
  Status AdvanceCheckpoints(uint64_t* last);
  bool IsPrepared(uint64_t batch) const;
  // Waits for Wake(), or not long after a round that left something to do. False: the store is
  // being closed.
  bool WaitForWork();
  // What became of keeping the cache small, and of the pending checkpoints, up to `batch`; whether
  // there is more to do, soon.
  void NoteRound(const Status& cache, const Status& checkpoints, uint64_t batch, bool has_more);
  // The caller does not hold mutex_.
  void Wake();

  // The caller of these holds mutex_.
  Status CheckHeld(uint64_t batch) const;
  void LetGo(uint64_t batch);

  ShardSet& shards_;
  // Set by Open(); null: closed.
  std::unique_ptr<pool::RowPool> pool_;
  std::optional<ReadAhead> read_ahead_;
  std::string directory_;
  std::optional<TrainConfig> saved_config_;  // in the directory's file (tier_rules.h)
  std::thread maintenance_thread_;
  std::thread prefetch_thread_;

  std::atomic<uint64_t> batch_ = 0;
  std::atomic<bool> has_failed_ = false;
  std::atomic<bool> is_over_budget_ = false;
  std::atomic<bool> has_work_ = false;
  std::atomic<bool> is_stopping_ = false;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  mutable std::condition_variable progress_;  // of checkpoints
  Status failure_;
  Status cache_error_;       // of the last round
  bool has_more_ = false;    // to do, after the last round
  Status checkpoint_error_;  // of the last round
  std::optional<uint64_t> held_;
  std::optional<pool::PreparedCheckpoint> prepared_;  // the held one
};

}  // namespace persia::store

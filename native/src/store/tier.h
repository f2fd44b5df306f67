// Tier: the storage beneath a store (pool/row_pool.h), and what the shards and the threads of the
// store share about it.
//
// A store's index knows all rows. Resident rows have cells in slabs like the rows of a store
// without a tier; cold rows are stored in the tier alone. A training call promotes the cold rows
// that it names into the cache of its shard (row_cache.h), which may exceed its budget by a
// sixteenth; the maintenance thread demotes the least recently used rows until the budget holds.
//
// Batches are counted from the tier's last checkpoint on; that number is a row's version. Beginning
// a checkpoint writes nothing. A row that changed up to it and that the tier lacks is written
// before it changes again; the maintenance thread writes the others, then commits. Where there is
// no room for that it tries again, and reports so.
//
// A second thread promotes rows that prefetch hints name.
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
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "pool/row_pool.h"

namespace persia::store {

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

class Tier {
 public:
  // `saved_config` is the config in the directory's file (tier_rules.h), if there is one.
  Tier(std::unique_ptr<pool::RowPool> pool, uint64_t cache_rows, std::string directory,
       std::optional<TrainConfig> saved_config)
      : pool_(std::move(pool)),
        read_ahead_(cache_rows / 2),
        directory_(std::move(directory)),
        saved_config_(std::move(saved_config)),
        batch_(pool_->committed() + 1),
        last_checkpoint_(pool_->committed()),
        last_committed_(pool_->committed()) {}

  pool::RowPool& pool() const { return *pool_; }
  ReadAhead& read_ahead() { return read_ahead_; }
  const ReadAhead& read_ahead() const { return read_ahead_; }
  // Saves the config beside the pool unless rows of the saved one could have been made by it: a
  // learning rate may change with every batch. Not thread-safe: the store's config lock is held.
  Status SaveConfigIfNew(const TrainConfig& config);
  uint64_t memory_bytes() const { return pool_->stats().memory_bytes + read_ahead_.memory_bytes(); }

  // The version of what changes now. It never falls: read with a shard locked, a row's versions
  // rise.
  uint64_t batch() const { return batch_.load(std::memory_order_relaxed); }
  void CountBatch() { batch_.fetch_add(1, std::memory_order_relaxed); }

  // Rows that changed up to it, and that the pool does not have, are written before they change.
  uint64_t last_checkpoint() const { return last_checkpoint_.load(std::memory_order_relaxed); }
  // Whether there may be such rows.
  bool HasPending() const { return last_committed_.load() < last_checkpoint(); }
  // The caller has the store for himself. Returns the checkpoint's number. One that is held is not
  // committed before CommitHeld(); there is one at a time.
  StatusOr<uint64_t> BeginCheckpoint(bool held);
  // The same. All rows and checkpoints go.
  Status Clear();
  // The oldest pending checkpoint, all rows of which are in the pool: it is committed or, if it is
  // held, prepared.
  Status EndCheckpoint(uint64_t batch);
  bool IsPrepared(uint64_t batch) const;
  StatusOr<std::optional<pool::PreparedCheckpoint>> PreparedHeld(uint64_t batch) const;
  Status CommitHeld(uint64_t batch);
  Status DropHeld(uint64_t batch);
  // StoreTier::WaitCheckpoint.
  Status WaitCheckpoint(uint64_t batch, std::chrono::milliseconds timeout) const;

  // What failed where no caller could be told: from then on all calls are. The pool's last
  // checkpoint is what remains.
  // Where there was no room, nothing has failed: who needs some is told.
  void Fail(const Status& status);
  Status status() const;

  // A cache is getting full: the maintenance thread is woken when the call is through with all
  // shards, for it needs the same ones.
  void MarkOverBudget() { is_over_budget_.store(true, std::memory_order_relaxed); }
  void WakeIfOverBudget() {
    if (is_over_budget_.load(std::memory_order_relaxed) && is_over_budget_.exchange(false)) Wake();
  }

  // For the maintenance thread.
  void Wake();
  // Soon, also without a Wake(), after something has not come about. False: the store is being
  // closed.
  bool WaitForWork();
  // What became of keeping the cache small, and of the pending checkpoints, up to `batch`; whether
  // there is more to do, soon.
  void NoteRound(const Status& cache, const Status& checkpoints, uint64_t batch, bool has_more);
  // Of the last round; Ok: nothing is in the way.
  Status last_error() const;
  void Stop();
  bool is_stopping() const { return is_stopping_.load(std::memory_order_relaxed); }

 private:
  Status Commit(uint64_t batch);
  // The caller of these holds mutex_.
  Status CheckHeld(uint64_t batch) const;
  void LetGo(uint64_t batch);
  void NoteCommitted(uint64_t batch);

  const std::unique_ptr<pool::RowPool> pool_;
  ReadAhead read_ahead_;
  const std::string directory_;
  std::optional<TrainConfig> saved_config_;
  std::atomic<uint64_t> batch_;
  std::atomic<uint64_t> last_checkpoint_;  // rises under the store's exclusive lock
  std::atomic<uint64_t> last_committed_;

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

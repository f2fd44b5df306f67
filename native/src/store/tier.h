// Tier: the pool beneath a store (pool/row_pool.h), and what its shards and its keeper share.
//
// The index knows all rows. Those in the cache, "hot", lie in slabs like the rows of a store
// without a tier; the others, "cold", are in the pool alone. A training call brings the cold rows
// that it names into the cache, which may exceed its size by a sixteenth; the keeper, a thread of
// its own, brings it back by moving the rows that were not used for the longest to the pool.
//
// Batches are counted from the pool's last checkpoint on: that number is a row's version. At a
// checkpoint nothing is written. A row that changed up to it and is not in the pool yet is written
// before it changes again, the others by the keeper, who then commits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/status.h"
#include "pool/row_pool.h"

namespace persia::store {

class Tier {
 public:
  explicit Tier(std::unique_ptr<pool::RowPool> pool)
      : pool_(std::move(pool)),
        batch_(pool_->committed() + 1),
        last_checkpoint_(pool_->committed()) {}

  pool::RowPool& pool() const { return *pool_; }

  // The version of what changes now. It never falls: read with a shard locked, a row's versions
  // rise.
  uint64_t batch() const { return batch_.load(std::memory_order_relaxed); }
  void CountBatch() { batch_.fetch_add(1, std::memory_order_relaxed); }

  // Rows that changed up to it, and that the pool does not have, are written before they change.
  uint64_t last_checkpoint() const { return last_checkpoint_; }
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

  // What failed where no caller could be told: from then on all calls are. The pool's last
  // checkpoint is what remains.
  void Fail(const Status& status);
  Status status() const;
  // What keeps the keeper from going on for now, such as a pool that is full; kOk: nothing.
  void NoteTrouble(const Status& status);

  // For the keeper.
  void Wake();
  // False: the store is being closed.
  bool WaitForWork();
  void StopKeeper();
  bool is_stopping() const { return is_stopping_.load(std::memory_order_relaxed); }

 private:
  Status Commit(uint64_t batch);
  // The caller holds mutex_.
  Status CheckHeld(uint64_t batch) const;

  const std::unique_ptr<pool::RowPool> pool_;
  std::atomic<uint64_t> batch_;
  uint64_t last_checkpoint_;  // changes with nobody else in the store

  std::atomic<bool> has_failed_ = false;
  std::atomic<bool> has_work_ = false;
  std::atomic<bool> is_stopping_ = false;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  Status failure_;
  Status trouble_;
  std::optional<uint64_t> held_;
  std::optional<pool::PreparedCheckpoint> prepared_;  // the held one
};

}  // namespace persia::store

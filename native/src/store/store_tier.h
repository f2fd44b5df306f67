// StoreTier: what a store does with its storage tier as a whole: recovery, checkpoints, prefetch
// hints, and the two threads that maintain it.
//
// The parts: tier.h keeps the state of batches and checkpoints, row_cache.h the resident rows of
// one shard. The maintenance thread demotes rows until each cache is within its budget, and writes
// and commits pending checkpoints. The prefetch thread promotes rows that hints name.
//
// Every store has one; it is closed unless EmbeddingStore::Open() opened it. Thread-safe once open.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>

#include "base/status.h"
#include "pool/pool_tools.h"
#include "pool/row_pool.h"
#include "store/tier.h"
#include "store/types.h"

namespace persia::store {

class Shard;
class ShardSet;

class StoreTier {
 public:
  // `shards` outlives it.
  explicit StoreTier(ShardSet* shards) : shards_(*shards) {}
  ~StoreTier();  // ends the threads; what is not committed then is lost
  StoreTier(const StoreTier&) = delete;
  StoreTier& operator=(const StoreTier&) = delete;

  // Once, before all other calls on the store. EmbeddingStore::Open's errors.
  Status Open(const TierOptions& options);

  // A checkpoint is the state that the store returns to after a crash. Requesting one fixes what it
  // contains; it is committed in the background, when stats() has it as `committed`. Returns its
  // number; numbers rise. A `held` one is written, and then it and all after it wait for
  // CommitCheckpoint() or DropCheckpoint(); at most one is held. kFailedPrecondition: there is no
  // tier, or no config; kResourceExhausted: too many are pending.
  StatusOr<uint64_t> RequestCheckpoint(bool held = false);
  // Waits until that checkpoint, or a later one, is committed. kDeadlineExceeded: it is not yet;
  // kResourceExhausted: there is no room for it, and the store keeps trying; kFailedPrecondition:
  // no such checkpoint was requested, or the rows were cleared since.
  Status WaitCheckpoint(uint64_t number, std::chrono::milliseconds timeout) const;
  // What the held checkpoint will commit; nothing before all of it is written. What keeps it from
  // being written, such as kResourceExhausted; kFailedPrecondition: it is not held (any more).
  StatusOr<std::optional<pool::PreparedCheckpoint>> PreparedCheckpoint(uint64_t number) const;
  // kFailedPrecondition: it is not held, or not prepared.
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
  // Nothing where there is no tier.
  std::optional<TierStats> stats() const;

 private:
  // kFailedPrecondition: there is none.
  StatusOr<Tier*> Require() const;
  StatusOr<std::optional<TrainConfig>> RecoverConfig(const std::string& directory,
                                                     const pool::PoolInfo& pool);
  StatusOr<std::unique_ptr<pool::RowPool>> OpenPool(const TierOptions& options, bool is_new);

  // The maintenance thread.
  void Maintain();
  Status ShrinkCaches(bool* has_more_memory);
  bool GiveBackMemory(const Shard& shard);
  Status AdvanceCheckpoints(uint64_t* last);
  // The prefetch thread.
  void FetchAhead();
  void FetchAhead(const Shard& shard, std::span<const uint64_t> keys);

  ShardSet& shards_;
  std::thread maintenance_thread_;
  std::thread prefetch_thread_;
};

}  // namespace persia::store

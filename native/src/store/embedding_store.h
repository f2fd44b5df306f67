// EmbeddingStore: the rows of one parameter server (or
// of the embedded mode), by sign, with LRU eviction.
//
// Structure: `num_internal_shards` independent shards, each with an open-addressing index of 64-bit
// signs to 32-bit slots, rows in slabs addressed by number, and one mutex. Batched calls group
// their signs by shard and prefetch ahead.
//
// Contracts
//  * Thread-safe: any number of threads may look up, update and read statistics at once. A batch is
//    atomic per shard, not across shards.
//  * A row's initial values depend on (seed, sign, dim) alone, never on order, threads or servers.
//  * The LRU order is exact to the batch: rows touched by a later training lookup are evicted after
//    rows touched by an earlier one, and a batch evicts none of its own rows while there are
//    others; rows of one batch are equally old. Inference never inserts, never reorders. Order and
//    capacity are each internal shard's own (the shares add up to `capacity`): the order between
//    shards is not kept, and a full shard evicts while another still has room.
//  * Rows whose group has a time to live go when no training batch has used them for that long, a
//  part
//    of the shard with each training batch (expiry.h).
//  * Memory grows with the rows that exist; nothing is preallocated for `capacity`.
//  * A row asked for with another dim is made anew: values and optimizer state as for a new sign.
//  * Update: a sign that has no row, or whose gradient is not finite, skips exactly its own
//  gradient
//    (counted).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "pool/row_pool.h"
#include "store/row_format.h"

namespace persia::store {

// `signs` of one dim; a request is a list of blocks, its rows are laid out block after block,
// row-major. No sign occurs twice in one request.
struct RowBlock {
  uint32_t dim = 0;
  std::span<const uint64_t> signs;
};

enum class LookupMode : uint8_t {
  kTrain = 0,      // inserts missing signs (subject to admission), refreshes the LRU order
  kInference = 1,  // missing signs read as zeros; changes nothing
};

struct LookupReport {
  uint64_t num_missing = 0;  // signs without a row before the call
  uint64_t num_inserted = 0;
  uint64_t num_unadmitted = 0;  // refused by admission: read as zeros
  uint64_t num_evicted = 0;
  uint64_t num_expired = 0;  // of totals alone: their time to live was over
  uint64_t num_small = 0;    // of totals alone: RemoveSmallRows()
};

struct UpdateReport {
  uint64_t num_updated = 0;
  uint64_t num_missing = 0;    // evicted or never admitted: their gradients were skipped
  uint64_t num_nonfinite = 0;  // left as they are: their gradients were NaN or infinite
};

struct StoreStats {
  uint64_t num_rows = 0;
  uint64_t memory_bytes = 0;  // index, slabs and order: everything the store holds
  LookupReport lookups;       // totals since start
  UpdateReport updates;
};

// Of rows that were changed, made or removed since changes were last taken.
struct ChangeStatus {
  uint64_t max_rows = 0;  // 0: changes are not tracked
  uint64_t num_rows = 0;
  bool is_due = false;          // half of max_rows: time to take them
  bool has_overflowed = false;  // nobody did: what has changed is not known any more
};

// Of a store with a tier (tier.h).
struct TierOptions {
  std::string directory;   // of the pool; must be there
  pool::PoolOptions pool;  // the schema is the store's to say
  // What is in memory, one of both; the internal shards divide it.
  uint64_t cache_rows = 0;
  uint64_t cache_bytes = 0;  // that these rows take, and what is known of all: up to 40 of each
};
struct TierStats {
  uint64_t num_rows = 0;
  uint64_t num_hot = 0;         // in memory
  uint64_t hot_bytes = 0;       // that these take
  uint64_t memory_bytes = 0;    // of all that cache_bytes counts
  uint64_t num_hits = 0;        // rows that lookups found there
  uint64_t num_misses = 0;      // rows that they had to read from the pool
  uint64_t num_promoted = 0;    // brought from the pool to memory
  uint64_t num_prefetched = 0;  // of these, by Prefetch()
  uint64_t num_unheeded = 0;    // signs that Prefetch() had no room for
  uint64_t num_demoted = 0;     // that have left memory
  uint64_t num_passes = 0;      // over a shard's index, for rows to leave
  uint64_t num_written = 0;     // versions, to the pool
  uint64_t num_moved = 0;       // in memory, so that some of it could be given back
  uint64_t batch = 0;  // what changes now is of; the one after `pool.committed`: nothing did
  // Why the store's thread cannot go on, which tries again; Ok: it can.
  Status last_error;
  pool::PoolStats pool;
};

class EmbeddingStore {
 public:
  struct Options {
    uint64_t capacity = 1'000'000'000;  // rows; the least recently used goes first
    uint32_t num_internal_shards = 16;  // 1 .. 65536, at most `capacity`
    bool counts_updates = false;        // of each row, for NumUpdates(); not with a tier
    // How embeddings lie in memory; what is handed in or out is float32, and so is the optimizer's
    // state. Of 16 bits: updates round by chance, all else to nearest; not with a tier.
    RowDtype row_dtype = RowDtype::kFloat32;
  };

  // Refuses zero capacity, zero shards, more shards than capacity.
  static StatusOr<std::unique_ptr<EmbeddingStore>> Create(const Options& options);
  // One whose rows are in a pool, but for a cache in memory: with the rows, the rules and the order
  // of the pool's committed checkpoint. A directory without a pool gets one. kInvalidArgument:
  // fewer cache_rows, or KiB of cache_bytes, than shards, or both; what RowPool::Open and Create
  // refuse; kCorruption.
  static StatusOr<std::unique_ptr<EmbeddingStore>> Open(const Options& options,
                                                        const TierOptions& tier);
  ~EmbeddingStore();

  // The same again is a no-op. A different one while rows exist: kFailedPrecondition naming the
  // field, unless `replace`, which allows a change of learning rate, weight decay, weight bound and
  // admission without touching rows; a different optimizer kind or initializer is refused even then
  // as long as rows exist.
  Status Configure(const TrainConfig& config, bool replace = false);
  std::optional<TrainConfig> config() const;

  // Writes sum(block.dim * block.signs.size()) floats. kTrain needs Configure first
  // (kFailedPrecondition); kInference on an unconfigured store reads zeros. kInvalidArgument: a dim
  // of 0 or above kMaxDim.
  Status Lookup(std::span<const RowBlock> blocks, LookupMode mode, float* rows,
                LookupReport* report = nullptr);

  // `gradients` laid out like the rows of Lookup. Applies the optimizer once to each row that
  // exists, then the weight bound.
  Status Update(std::span<const RowBlock> blocks, const float* gradients,
                UpdateReport* report = nullptr);

  // Sets embeddings (inserting where needed), optimizer
  // state as for a new row. Pretrained rows come in here.
  Status SetRows(std::span<const RowBlock> blocks, const float* rows);

  // Removes the rows whose embedding has a norm below their group's `min_norm`; rows of groups
  // without one stay. Other calls go on meanwhile: a shard is kept from them for some tens of
  // microseconds at a time. Returns how many went. kFailedPrecondition: rows are being loaded, or a
  // snapshot is under way.
  StatusOr<uint64_t> RemoveSmallRows();

  // Of a store with a tier. What was changed up to now is what the store goes back to, once the
  // checkpoint is committed, which comes about beside other calls: when tier_stats() has it as
  // `committed`. Returns its number, which rises. kFailedPrecondition: there is no tier;
  // kResourceExhausted: too many are pending. One that is held is written, and then waits for the
  // caller's word, like all after it; there is one at a time.
  StatusOr<uint64_t> RequestCheckpoint(bool held = false);
  // Until that checkpoint, or a later one, is committed. kDeadlineExceeded: it is not yet;
  // kResourceExhausted: there is no room for it, and as long as that is so it is tried again;
  // kFailedPrecondition: there is none of this number, or the rows were cleared since.
  Status WaitCheckpoint(uint64_t batch, std::chrono::milliseconds timeout) const;
  // Of the held one: what is to be committed, once all of it is in the pool. What keeps it from
  // getting there, such as kResourceExhausted; kFailedPrecondition: it is not held (any more).
  StatusOr<std::optional<pool::PreparedCheckpoint>> PreparedCheckpoint(uint64_t number) const;
  // kFailedPrecondition: it is not held, or not prepared.
  Status CommitCheckpoint(uint64_t number);
  // It is given up: the store goes back to the one before.
  Status DropCheckpoint(uint64_t number);
  // A hint, of a store with a tier: the next training lookups name these signs. A thread brings
  // their rows into memory, in the order of the calls; returns at once. Changes no row, nor the
  // order of eviction. Where more signs wait than half the cache has rows, the rest is dropped.
  void Prefetch(std::span<const uint64_t> signs);
  // Whether that is worth a message: rows elsewhere have to be read from a file. Those of a pool
  // that is mapped are read as fast by the lookup itself.
  bool WantsPrefetch() const;
  // Nothing where there is no tier.
  std::optional<TierStats> tier_stats() const;

  // How many updates the row of each sign has had since it was made, set or loaded, those included
  // whose gradient was not finite; up to 2^32 - 1. 0: there is no row. kFailedPrecondition: the
  // store does not count.
  Status NumUpdates(std::span<const uint64_t> signs, std::span<uint32_t> counts) const;

  uint64_t size() const;
  StoreStats stats() const;
  // Of a store with a tier also the checkpoints; what fails there, the next call is told.
  void Clear();

  // From now on the store remembers which rows change, up to `max_rows` of them (16 to 32 bytes
  // each, at once): for StoreSnapshot::TakeChanges. Begins anew where it did already; 0 ends it.
  // That a lookup used a row is no change. kInvalidArgument: above ChangeSet::kMaxKeys;
  // kFailedPrecondition: a snapshot or a loading is under way.
  Status TrackChanges(uint64_t max_rows);
  ChangeStatus change_status() const;

  static constexpr uint32_t kMaxDim = 65536;

 private:
  friend class InPlaceRows;
  friend class StoreSnapshot;
  friend class StoreLoad;
  class Impl;
  explicit EmbeddingStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::store

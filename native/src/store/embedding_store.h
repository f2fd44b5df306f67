// EmbeddingStore: the rows of one parameter server (or of an embedded job), by sign, with LRU
// eviction.
//
// Structure: `num_internal_shards` independent shards (shard.h), each with an open-addressing index
// of 64-bit signs to 32-bit cells, rows in slabs addressed by number, and one mutex. Batched calls
// group their signs by shard and overlap the cache misses of many signs.
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
//  * Rows whose group has a time to live are removed once no training batch has used them for that
//    long, a part of the shard with each training batch (expiry.h).
//  * Memory grows with the rows that exist; nothing is preallocated for `capacity`.
//  * A row asked for with another dim is made anew: values and optimizer state as for a new sign.
//  * An update skips the gradients of signs that have no row, and gradients that are not finite,
//    and counts them. All others of the batch are applied.
//
// Snapshots (store_snapshot.h), loading (store_load.h), in-place use (in_place_rows.h) and the
// storage tier (store_tier.h) are classes beside this one that act on its shards().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/status.h"
#include "base/train_config.h"
#include "store/recent_lookups.h"
#include "store/shard_set.h"
#include "store/store_tier.h"
#include "store/types.h"

namespace persia::store {

class EmbeddingStore {
 public:
  using Options = ShardSet::Options;

  // A store in memory. kInvalidArgument: zero capacity, zero shards, more shards than capacity.
  static StatusOr<std::unique_ptr<EmbeddingStore>> Create(const Options& options);
  // A store with a tier, which keeps all rows but a cache of resident ones on a file or persistent
  // memory. It begins with the rows, the config and the order of the tier's committed checkpoint; a
  // directory without a tier gets a new one. kInvalidArgument: fewer cache_rows, or KiB of
  // cache_bytes, than shards, or both; what RowPool::Open and Create refuse; kCorruption.
  static StatusOr<std::unique_ptr<EmbeddingStore>> Open(const Options& options,
                                                        const TierOptions& tier);

  // The same config again is a no-op. A different one while rows exist: kFailedPrecondition naming
  // the field, unless `replace`, which allows a change of learning rate, weight decay, weight bound
  // and admission without touching rows; a different optimizer kind or initializer is refused even
  // then as long as rows exist.
  Status Configure(const TrainConfig& config, bool replace = false);
  std::optional<TrainConfig> config() const { return shards_.config(); }

  // Writes sum(block.dim * block.signs.size()) floats. kTrain needs Configure first
  // (kFailedPrecondition); kInference on an unconfigured store reads zeros. kInvalidArgument: a dim
  // of 0 or above kMaxDim.
  Status Lookup(std::span<const RowBlock> blocks, LookupMode mode, float* rows,
                LookupReport* report = nullptr);

  // `gradients` laid out like the rows of Lookup. Applies the optimizer once to each row that
  // exists, then the weight bound.
  Status Update(std::span<const RowBlock> blocks, const float* gradients,
                UpdateReport* report = nullptr);

  // Sets embeddings, inserting rows where needed, with the optimizer state of new rows: for
  // pretrained embeddings.
  Status SetRows(std::span<const RowBlock> blocks, const float* rows);

  // Removes the rows whose embedding has a norm below their group's `min_norm`; rows of groups
  // without one stay. Other calls proceed meanwhile: a shard is locked for some tens of
  // microseconds at a time. Returns how many were removed. kFailedPrecondition: rows are being
  // loaded, or a snapshot is under way.
  StatusOr<uint64_t> RemoveSmallRows();

  // How many updates the row of each sign has had since it was made, set or loaded, those included
  // whose gradient was not finite; saturates at 2^32 - 1. 0: there is no row. kFailedPrecondition:
  // the store does not count.
  Status NumUpdates(std::span<const uint64_t> signs, std::span<uint32_t> counts) const;

  uint64_t size() const;
  StoreStats stats() const;
  // Removes all rows, and a tier's checkpoints. Where that fails in the tier, the next call reports
  // it.
  void Clear();

  // From now on the store remembers which rows change, up to `max_rows` of them (16 to 32 bytes
  // each, allocated at once): for StoreSnapshot::TakeChanges. Begins anew where it did already; 0
  // ends it. That a lookup used a row is no change. kInvalidArgument: above ChangeSet::kMaxKeys;
  // kFailedPrecondition: a snapshot or a loading is under way.
  Status TrackChanges(uint64_t max_rows);
  ChangeStatus change_status() const;

  // Checkpoints, prefetch hints and statistics of the tier. Stores in memory have a closed one,
  // whose calls fail or do nothing.
  StoreTier& tier() { return tier_; }
  const StoreTier& tier() const { return tier_; }

  // For the files of this folder that act on a whole store.
  ShardSet& shards() { return shards_; }

 private:
  explicit EmbeddingStore(const Options& options) : shards_(options), tier_(&shards_) {}

  // Lookup() and Update() of a store without a tier, whose rows stay where they are.
  Status LookupAndRemember(std::span<const RowBlock> blocks, float* rows, LookupReport* counts);
  Status UpdateFound(std::span<const RowBlock> blocks, const float* gradients,
                     UpdateReport* counts);

  ShardSet shards_;
  RecentLookups recent_;
  StoreTier tier_;  // its threads use shards_, and end first
};

}  // namespace persia::store

#include "store/store_tier.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "store/shard_set.h"
#include "store/tier_rules.h"

namespace persia::store {
namespace {

// What a pool's header says of its rows; the config is beside it (tier_rules.h).
constexpr const char* kSchema = "embedding rows";

// For what must be sized before there are rows: a cache of bytes holds at least so many wide rows.
uint64_t LeastCacheRows(const TierOptions& options) {
  constexpr uint64_t kWideRowBytes = 1024;
  return options.cache_bytes > 0 ? options.cache_bytes / kWideRowBytes : options.cache_rows;
}

// Policies of another store, or of another time, would read past the ends of its rows.
Status CheckShape(const RowPolicies& policies, const pool::RowHead& head) {
  const RowShape shape = policies.OfKey(SignKey(head.sign)).ShapeFor(head.dim);
  if (shape.state_floats == head.state_floats && shape.has_scalar == (head.has_scalar != 0)) {
    return Status::Ok();
  }
  return Corruption("the pool's row of sign " + std::to_string(head.sign) + " has dim " +
                    std::to_string(head.dim) + " and " + std::to_string(head.state_floats) +
                    " floats of optimizer state, and by the file rules beside the pool it has " +
                    std::to_string(shape.state_floats) +
                    "; the file is of other rows: put the right one there, or remove both and "
                    "load a checkpoint");
}

// A row of the tier's last checkpoint, which begins as a cold one.
Status AddRecovered(const pool::RecoveredRow& row, Shard* shard) {
  const std::lock_guard lock(shard->mutex());
  ShardTable& table = shard->table();
  PERSIA_RETURN_IF_ERROR(CheckShape(*table.policies(), row.head));
  const uint32_t cell =
      AllocateCold({row.address, row.head.dim, row.head.state_floats}, &table.slabs());
  if (cell == ShardTable::kNoCell) return OutOfMemory(table);
  table.MakePast();
  const auto age = static_cast<uint32_t>(std::min<uint64_t>(row.age, table.now()));
  const bool is_adopted =
      table.Adopt({SignKey(row.head.sign), cell, table.now() - age}) != ShardTable::kNoCell;
  return is_adopted ? Status::Ok() : OutOfMemory(table);
}

}  // namespace

StoreTier::~StoreTier() {
  Tier* tier = shards_.tier();
  if (tier == nullptr) return;
  tier->Stop();
  if (maintenance_thread_.joinable()) maintenance_thread_.join();
  if (prefetch_thread_.joinable()) prefetch_thread_.join();
}

Status StoreTier::Open(const TierOptions& options) {
  auto found = pool::InspectPool(options.directory);
  std::optional<TrainConfig> saved_config;
  if (found.ok()) {
    auto recovered = RecoverConfig(options.directory, *found);
    PERSIA_RETURN_IF_ERROR(recovered.status());
    saved_config = std::move(*recovered);
  }
  auto pool = OpenPool(options, found.status().code() == StatusCode::kNotFound);
  PERSIA_RETURN_IF_ERROR(pool.status());
  shards_.AttachTier(std::make_unique<Tier>(std::move(*pool), LeastCacheRows(options),
                                            options.directory, std::move(saved_config)));
  const uint64_t num_shards = shards_.count();
  for (uint64_t i = 0; i < num_shards; ++i) {
    const auto share = [&](uint64_t all) { return all / num_shards + (i < all % num_shards); };
    const CacheBudget cache = options.cache_bytes > 0
                                  ? CacheBudget::OfBytes(share(options.cache_bytes))
                                  : CacheBudget::OfRows(share(options.cache_rows));
    Shard& shard = shards_.all()[i];
    shard.SetTier(shards_.tier(), cache, share(LeastCacheRows(options)) / 4);
    LookupReport counts;
    const std::lock_guard lock(shard.mutex());
    PERSIA_RETURN_IF_ERROR(shard.Trim(&counts));
  }
  maintenance_thread_ = std::thread([this] { Maintain(); });
  prefetch_thread_ = std::thread([this] { FetchAhead(); });
  return shards_.CheckTier();
}

// The config of another pool is that of one that was removed. Where this pool has no rows yet, it
// cannot be wrong for any, and is ignored.
StatusOr<std::optional<TrainConfig>> StoreTier::RecoverConfig(const std::string& directory,
                                                              const pool::PoolInfo& pool) {
  auto rules = LoadRules(directory);
  PERSIA_RETURN_IF_ERROR(rules.status());
  if (!rules->has_value()) return std::optional<TrainConfig>();
  if ((*rules)->pool_id != pool.pool_id) {
    if (pool.num_rows == 0) return std::optional<TrainConfig>();
    return Corruption("the file rules in " + directory + " is of the pool with pool_id " +
                      std::to_string((*rules)->pool_id) + ", and the pool beside it has pool_id " +
                      std::to_string(pool.pool_id) +
                      "; put its own there, or remove both and load a checkpoint");
  }
  const std::unique_lock lock(shards_.mutex());
  PERSIA_RETURN_IF_ERROR(
      shards_.Configure((*rules)->config, /*replace=*/true, /*is_recovered=*/true));
  return std::optional(std::move((*rules)->config));
}

StatusOr<std::unique_ptr<pool::RowPool>> StoreTier::OpenPool(const TierOptions& options,
                                                             bool is_new) {
  pool::PoolOptions pool_options = options.pool;
  pool_options.schema = kSchema;
  if (is_new) return pool::RowPool::Create(options.directory, pool_options);
  std::mutex mutex;
  Status visited;
  // Called by several threads at once, each with rows of its own.
  const auto add = [&](std::span<const pool::RecoveredRow> rows) {
    Status status = shards_.IsConfigured()
                        ? Status::Ok()
                        : Corruption("the pool in " + options.directory +
                                     " has rows, and the file with their rules is missing; remove "
                                     "it and load a checkpoint");
    for (size_t i = 0; i < rows.size() && status.ok(); ++i) {
      const uint64_t key = SignKey(rows[i].head.sign);
      status = AddRecovered(rows[i], &shards_.all()[ShardOfKey(key, shards_.count())]);
    }
    const std::lock_guard lock(mutex);
    if (!status.ok()) visited = status;
  };
  auto pool = pool::RowPool::Open(options.directory, pool_options, add);
  if (pool.ok() && !visited.ok()) return visited;
  return pool;
}

void StoreTier::Maintain() {
  Tier& tier = *shards_.tier();
  while (tier.WaitForWork()) {
    // Where there is no room to demote rows, checkpoints are tried all the same: one may need no
    // room, and committing it leaves some.
    bool has_more = false;
    const Status cache = ShrinkCaches(&has_more);
    uint64_t batch = 0;
    const Status checkpoints = AdvanceCheckpoints(&batch);
    tier.Fail(cache);
    tier.Fail(checkpoints);
    tier.NoteRound(cache, checkpoints, batch, has_more);
  }
}

// Where one shard finds no room, others may need none. Returns the first error. *has_more: there is
// memory to give back, later.
Status StoreTier::ShrinkCaches(bool* has_more_memory) {
  Status first_error;
  for (const Shard& shard : shards_.all()) {
    StatusOr<bool> has_more = true;
    while (has_more.ok() && *has_more && !shards_.tier()->is_stopping()) {
      const std::shared_lock lock(shards_.mutex());
      has_more = shard.cache()->Shrink();
    }
    *has_more_memory |= GiveBackMemory(shard);
    if (first_error.ok()) first_error = has_more.status();
  }
  return first_error;
}

bool StoreTier::GiveBackMemory(const Shard& shard) {
  uint64_t next = 0;
  auto progress = RowCache::GiveBack::kMore;
  while (progress == RowCache::GiveBack::kMore && !shards_.tier()->is_stopping()) {
    const std::shared_lock lock(shards_.mutex());
    progress = shard.cache()->GiveBackMemory(&next);
  }
  return progress == RowCache::GiveBack::kLater;
}

// Once a checkpoint has begun, no row changes up to it any more: one pass over the rows is enough.
// *last: the checkpoint that the result is about.
Status StoreTier::AdvanceCheckpoints(uint64_t* last) {
  Tier& tier = *shards_.tier();
  while (const auto batch = tier.pool().oldest_pending()) {
    *last = *batch;
    if (tier.IsPrepared(*batch)) return Status::Ok();  // whoever holds it decides
    for (const Shard& shard : shards_.all()) {
      uint64_t next = 0;
      StatusOr<bool> has_more = true;
      while (*has_more) {
        if (tier.is_stopping()) return Status::Ok();
        const std::shared_lock lock(shards_.mutex());
        has_more = shard.cache()->WriteBackUpTo(*batch, &next);
        PERSIA_RETURN_IF_ERROR(has_more.status());
        tier.Fail(shard.cache()->Shrink().status());
      }
    }
    PERSIA_RETURN_IF_ERROR(tier.EndCheckpoint(*batch));
  }
  return Status::Ok();
}

void StoreTier::FetchAhead() {
  Tier& tier = *shards_.tier();
  std::vector<uint64_t> signs;
  std::vector<std::vector<uint64_t>> keys(shards_.count());
  while (tier.read_ahead().Take(&signs)) {
    for (const uint64_t sign : signs) {
      const uint64_t key = SignKey(sign);
      keys[ShardOfKey(key, shards_.count())].push_back(key);
    }
    for (uint32_t i = 0; i < shards_.count(); ++i) {
      FetchAhead(shards_.all()[i], keys[i]);
      keys[i].clear();
    }
    tier.WakeIfOverBudget();
  }
}

void StoreTier::FetchAhead(const Shard& shard, std::span<const uint64_t> keys) {
  for (size_t begin = 0; begin < keys.size(); begin += kAheadAtATime) {
    const std::shared_lock lock(shards_.mutex());
    const auto step = keys.subspan(begin, std::min(kAheadAtATime, keys.size() - begin));
    // What fails here, the lookup that needs the row reports.
    if (shards_.tier()->is_stopping() || !shard.cache()->Prefetch(step).ok()) return;
  }
}

StatusOr<Tier*> StoreTier::Require() const {
  if (shards_.tier() != nullptr) return shards_.tier();
  return FailedPrecondition("the rows of this store are in memory alone: it has no tier");
}

Status StoreTier::WaitCheckpoint(uint64_t number, std::chrono::milliseconds timeout) const {
  auto tier = Require();
  PERSIA_RETURN_IF_ERROR(tier.status());
  return (*tier)->WaitCheckpoint(number, timeout);
}

void StoreTier::Prefetch(std::span<const uint64_t> signs) {
  if (shards_.tier() != nullptr) shards_.tier()->read_ahead().Add(signs);
}

bool StoreTier::WantsPrefetch() const {
  return shards_.tier() != nullptr && !shards_.tier()->pool().is_mapped();
}

StatusOr<uint64_t> StoreTier::RequestCheckpoint(bool held) {
  auto tier = Require();
  PERSIA_RETURN_IF_ERROR(tier.status());
  if (!shards_.IsConfigured()) {
    return FailedPrecondition(
        "no optimizer yet, and so no rows: a TrainCtx that is entered configures it; dump after "
        "that");
  }
  const std::unique_lock lock(shards_.mutex());
  auto batch = (*tier)->BeginCheckpoint(held);
  if (batch.ok()) (*tier)->Wake();
  return batch;
}

StatusOr<std::optional<pool::PreparedCheckpoint>> StoreTier::PreparedCheckpoint(
    uint64_t number) const {
  auto tier = Require();
  PERSIA_RETURN_IF_ERROR(tier.status());
  return (*tier)->PreparedHeld(number);
}

Status StoreTier::CommitCheckpoint(uint64_t number) {
  auto tier = Require();
  PERSIA_RETURN_IF_ERROR(tier.status());
  // Without the store's lock: the device may take its time, and training must not wait for it.
  PERSIA_RETURN_IF_ERROR((*tier)->CommitHeld(number));
  (*tier)->Wake();  // for checkpoints behind it
  return Status::Ok();
}

Status StoreTier::DropCheckpoint(uint64_t number) {
  auto tier = Require();
  PERSIA_RETURN_IF_ERROR(tier.status());
  const std::shared_lock lock(shards_.mutex());
  PERSIA_RETURN_IF_ERROR((*tier)->DropHeld(number));
  (*tier)->Wake();
  return Status::Ok();
}

std::optional<TierStats> StoreTier::stats() const {
  const Tier* tier = shards_.tier();
  if (tier == nullptr) return std::nullopt;
  const std::shared_lock lock(shards_.mutex());
  TierStats stats;
  for (const Shard& shard : shards_.all()) shard.cache()->AddStatsTo(&stats);
  stats.memory_bytes = shards_.Stats().memory_bytes;
  stats.num_unheeded = tier->read_ahead().num_dropped();
  stats.last_error = tier->last_error();
  stats.batch = tier->batch();
  stats.pool = tier->pool().stats();
  return stats;
}

}  // namespace persia::store

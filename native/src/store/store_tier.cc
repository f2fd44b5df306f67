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
  return Corruption("the pool's row of sign ", head.sign, " has dim ", head.dim, " and ",
                    head.state_floats,
                    " floats of optimizer state, and by the file rules beside the pool it has ",
                    shape.state_floats,
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

// One entry for each call: they are taken in the order of batches.
void ReadAhead::Add(std::span<const uint64_t> signs) {
  {
    const std::lock_guard lock(mutex_);
    const size_t count = std::min(signs.size(), max_signs_ - num_waiting_);
    num_dropped_ += signs.size() - count;
    if (count == 0) return;
    waiting_.emplace_back(signs.begin(), signs.begin() + static_cast<std::ptrdiff_t>(count));
    num_waiting_ += count;
  }
  wake_.notify_one();
}

// Hints that wait when the store is closed are dropped.
bool ReadAhead::Take(std::vector<uint64_t>* signs) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return is_stopping_ || !waiting_.empty(); });
  if (is_stopping_) return false;
  *signs = std::move(waiting_.front());
  waiting_.pop_front();
  num_waiting_ -= signs->size();
  return true;
}

void ReadAhead::Stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
}

uint64_t ReadAhead::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

uint64_t ReadAhead::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_waiting_ * sizeof(uint64_t);
}

// Threads end after the step that they are at. Rows that only memory has are lost, as in a crash:
// what a job may go back to is what it has committed.
StoreTier::~StoreTier() {
  if (pool_ == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  read_ahead_->Stop();
  if (maintenance_thread_.joinable()) maintenance_thread_.join();
  if (prefetch_thread_.joinable()) prefetch_thread_.join();
}

Status StoreTier::Open(const TierOptions& options) {
  // The config before the rows: recovered rows are counted and checked by its policies.
  auto found = pool::InspectPool(options.directory);
  if (found.ok()) {
    PERSIA_ASSIGN_OR_RETURN(saved_config_, RecoverConfig(options.directory, *found));
  }
  PERSIA_ASSIGN_OR_RETURN(pool_, OpenPool(options, found.status().code() == StatusCode::kNotFound));
  read_ahead_.emplace(LeastCacheRows(options) / 2);
  directory_ = options.directory;
  batch_ = pool_->committed() + 1;
  shards_.AttachTier(this);
  const uint64_t num_shards = shards_.count();
  for (uint64_t i = 0; i < num_shards; ++i) {
    const auto share = [&](uint64_t all) { return all / num_shards + (i < all % num_shards); };
    const CacheBudget cache = options.cache_bytes > 0
                                  ? CacheBudget::OfBytes(share(options.cache_bytes))
                                  : CacheBudget::OfRows(share(options.cache_rows));
    Shard& shard = shards_.all()[i];
    shard.SetTier(this, cache, share(LeastCacheRows(options)) / 4);
    LookupReport counts;
    const std::lock_guard lock(shard.mutex());
    PERSIA_RETURN_IF_ERROR(shard.Trim(&counts));
  }
  // Last: both use the caches of all shards.
  maintenance_thread_ = std::thread([this] { Maintain(); });
  prefetch_thread_ = std::thread([this] { FetchAhead(); });
  return status();
}

// The config of another pool is that of one that was removed. Where this pool has no rows yet, it
// cannot be wrong for any, and is ignored.
StatusOr<std::optional<TrainConfig>> StoreTier::RecoverConfig(const std::string& directory,
                                                              const pool::PoolInfo& pool) {
  PERSIA_ASSIGN_OR_RETURN(auto rules, LoadRules(directory));
  if (!rules.has_value()) return std::optional<TrainConfig>();
  if (rules->pool_id != pool.pool_id) {
    if (pool.num_rows == 0) return std::optional<TrainConfig>();
    return Corruption("the file rules in ", directory, " is of the pool with pool_id ",
                      rules->pool_id, ", and the pool beside it has pool_id ", pool.pool_id,
                      "; put its own there, or remove both and load a checkpoint");
  }
  const std::unique_lock lock(shards_.mutex());
  PERSIA_RETURN_IF_ERROR(shards_.Configure(rules->config, /*replace=*/true, /*is_recovered=*/true));
  return std::optional(std::move(rules->config));
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
                        : Corruption("the pool in ", options.directory,
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
  while (WaitForWork()) {
    // Where there is no room to demote rows, checkpoints are tried all the same: one may need no
    // room, and committing it leaves some.
    bool has_more = false;
    const Status cache = ShrinkCaches(&has_more);
    uint64_t batch = 0;
    const Status checkpoints = AdvanceCheckpoints(&batch);
    Fail(cache);
    Fail(checkpoints);
    NoteRound(cache, checkpoints, batch, has_more);
  }
}

// The store's lock is let go between steps: exclusive callers wait for one step.
template <typename Step>
Status StoreTier::InSteps(Step step) {
  while (!is_stopping_) {
    const std::shared_lock lock(shards_.mutex());
    PERSIA_ASSIGN_OR_RETURN(const bool has_more, step());
    if (!has_more) break;
  }
  return Status::Ok();
}

// Where one shard finds no room, others may need none. Returns the first error. *has_more: there is
// memory to give back, later.
Status StoreTier::ShrinkCaches(bool* has_more_memory) {
  Status first_error;
  for (const Shard& shard : shards_.all()) {
    const Status status = InSteps([&] { return shard.cache()->Shrink(); });
    *has_more_memory |= GiveBackMemory(shard);
    if (first_error.ok()) first_error = status;
  }
  return first_error;
}

bool StoreTier::GiveBackMemory(const Shard& shard) {
  uint64_t next = 0;
  auto progress = RowCache::GiveBack::kMore;
  static_cast<void>(InSteps([&]() -> StatusOr<bool> {
    progress = shard.cache()->GiveBackMemory(&next);
    return progress == RowCache::GiveBack::kMore;
  }));
  return progress == RowCache::GiveBack::kLater;
}

// Once a checkpoint has begun, no row changes up to it any more: one pass over the rows is enough.
// *last: the checkpoint that the result is about.
Status StoreTier::AdvanceCheckpoints(uint64_t* last) {
  while (const auto batch = pool_->oldest_pending()) {
    *last = *batch;
    if (IsPrepared(*batch)) return Status::Ok();  // whoever holds it decides
    for (const Shard& shard : shards_.all()) {
      uint64_t next = 0;
      PERSIA_RETURN_IF_ERROR(InSteps([&]() -> StatusOr<bool> {
        PERSIA_ASSIGN_OR_RETURN(const bool has_more, shard.cache()->WriteBackUpTo(*batch, &next));
        Fail(shard.cache()->Shrink().status());
        return has_more;
      }));
    }
    if (is_stopping_) return Status::Ok();
    PERSIA_RETURN_IF_ERROR(EndCheckpoint(*batch));
  }
  return Status::Ok();
}

// Grouped by shard, so that a shard is locked once for many signs and the device gets many reads.
void StoreTier::FetchAhead() {
  std::vector<uint64_t> signs;
  std::vector<std::vector<uint64_t>> keys(shards_.count());
  while (read_ahead_->Take(&signs)) {
    for (const uint64_t sign : signs) {
      const uint64_t key = SignKey(sign);
      keys[ShardOfKey(key, shards_.count())].push_back(key);
    }
    for (uint32_t i = 0; i < shards_.count(); ++i) {
      FetchAhead(shards_.all()[i], keys[i]);
      keys[i].clear();
    }
    WakeIfOverBudget();
  }
}

void StoreTier::FetchAhead(const Shard& shard, std::span<const uint64_t> keys) {
  for (size_t begin = 0; begin < keys.size(); begin += kAheadAtATime) {
    const std::shared_lock lock(shards_.mutex());
    const auto step = keys.subspan(begin, std::min(kAheadAtATime, keys.size() - begin));
    // What fails here, the lookup that needs the row reports.
    if (is_stopping_ || !shard.cache()->Prefetch(step).ok()) return;
  }
}

Status StoreTier::CheckOpen() const {
  if (pool_ != nullptr) return Status::Ok();
  return FailedPrecondition("the rows of this store are in memory alone: it has no tier");
}

void StoreTier::Prefetch(std::span<const uint64_t> signs) {
  if (pool_ != nullptr) read_ahead_->Add(signs);
}

bool StoreTier::WantsPrefetch() const { return pool_ != nullptr && !pool_->is_mapped(); }

uint64_t StoreTier::memory_bytes() const {
  return pool_->stats().memory_bytes + read_ahead_->memory_bytes();
}

std::optional<TierStats> StoreTier::stats() const {
  if (pool_ == nullptr) return std::nullopt;
  const std::shared_lock store_lock(shards_.mutex());
  TierStats stats;
  for (const Shard& shard : shards_.all()) shard.cache()->AddStatsTo(&stats);
  stats.memory_bytes = shards_.Stats().memory_bytes;
  stats.num_unheeded = read_ahead_->num_dropped();
  stats.batch = batch();
  stats.pool = pool_->stats();
  const std::lock_guard lock(mutex_);
  stats.last_error = checkpoint_error_.ok() ? cache_error_ : checkpoint_error_;
  return stats;
}

}  // namespace persia::store

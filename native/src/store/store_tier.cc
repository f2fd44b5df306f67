// The part of EmbeddingStore that opens its tier, takes checkpoints there and keeps the caches
// small.
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "pool/pool_tools.h"
#include "store/config_change.h"
#include "store/store_impl.h"
#include "store/tier_cells.h"
#include "store/tier_rules.h"

namespace persia::store {
namespace {

// What a pool's header says of its rows; the rules are beside it (tier_rules.h).
constexpr const char* kSchema = "embedding rows";

// How many rows a cache of bytes has room for is known when rows are: as if they were wide.
uint64_t LeastCacheRows(const TierOptions& options) {
  constexpr uint64_t kWideRowBytes = 1024;
  return options.cache_bytes > 0 ? options.cache_bytes / kWideRowBytes : options.cache_rows;
}

}  // namespace

Status EmbeddingStore::Impl::OpenTier(const TierOptions& options) {
  tier_directory_ = options.directory;
  auto found = pool::InspectPool(options.directory);
  if (found.ok()) PERSIA_RETURN_IF_ERROR(RecoverRules(*found));
  const bool is_new = found.status().code() == StatusCode::kNotFound;
  PERSIA_RETURN_IF_ERROR(OpenPool(options, is_new));
  const uint64_t num_shards = shards_.size();
  for (uint64_t i = 0; i < num_shards; ++i) {
    const auto share = [&](uint64_t all) { return all / num_shards + (i < all % num_shards); };
    const CacheBudget cache = options.cache_bytes > 0
                                  ? CacheBudget::OfBytes(share(options.cache_bytes))
                                  : CacheBudget::OfRows(share(options.cache_rows));
    shards_[i].SetTier(tier_.get(), cache, share(LeastCacheRows(options)) / 4);
    LookupReport counts;
    PERSIA_RETURN_IF_ERROR(shards_[i].FinishLoad(&counts));
  }
  maintenance_thread_ = std::thread([this] { MaintainTier(); });
  prefetch_thread_ = std::thread([this] { FetchAhead(); });
  return CheckTier();
}

// Rules of another pool are those of one that was removed, where this one has no rows yet: then
// there is nothing that they could be wrong for.
Status EmbeddingStore::Impl::RecoverRules(const pool::PoolInfo& pool) {
  auto rules = LoadRules(tier_directory_);
  PERSIA_RETURN_IF_ERROR(rules.status());
  if (!rules->has_value()) return Status::Ok();
  if ((*rules)->pool_id != pool.pool_id) {
    if (pool.num_rows == 0) return Status::Ok();
    return Corruption("the file rules in " + tier_directory_ + " is of the pool with pool_id " +
                      std::to_string((*rules)->pool_id) + ", and the pool beside it has pool_id " +
                      std::to_string(pool.pool_id) +
                      "; put its own there, or remove both and load a checkpoint");
  }
  const std::unique_lock lock(in_place_mutex_);
  PERSIA_RETURN_IF_ERROR(ConfigureAlone((*rules)->config, /*replace=*/true));
  is_config_recovered_ = true;
  saved_rules_ = std::move((*rules)->config);
  return Status::Ok();
}

Status EmbeddingStore::Impl::OpenPool(const TierOptions& options, bool is_new) {
  pool::PoolOptions pool_options = options.pool;
  pool_options.schema = kSchema;
  StatusOr<std::unique_ptr<pool::RowPool>> pool = Status();
  if (is_new) {
    pool = pool::RowPool::Create(options.directory, pool_options);
  } else {
    std::mutex mutex;
    Status visited;
    const auto num_shards = static_cast<uint32_t>(shards_.size());
    const auto add = [&](std::span<const pool::RecoveredRow> rows) {
      Status status = IsConfigured() ? Status::Ok()
                                     : Corruption("the pool in " + options.directory +
                                                  " has rows, and the file with their rules is "
                                                  "missing; remove it and load a checkpoint");
      for (size_t i = 0; i < rows.size() && status.ok(); ++i) {
        const uint64_t key = SignKey(rows[i].head.sign);
        status = shards_[ShardOfKey(key, num_shards)].AddRecovered(rows[i]);
      }
      const std::lock_guard lock(mutex);
      if (!status.ok()) visited = status;
    };
    pool = pool::RowPool::Open(options.directory, pool_options, add);
    if (pool.ok()) PERSIA_RETURN_IF_ERROR(visited);
  }
  PERSIA_RETURN_IF_ERROR(pool.status());
  tier_ = std::make_unique<Tier>(std::move(*pool), LeastCacheRows(options));
  return Status::Ok();
}

// Rules that rows of the saved ones could have been made by need not be saved again: a learning
// rate may change with every batch.
Status EmbeddingStore::Impl::SaveRulesIfNew(const TrainConfig& config) {
  const bool are_saved =
      saved_rules_.has_value() &&
      saved_rules_->feature_index_prefix_bit == config.feature_index_prefix_bit &&
      saved_rules_->groups.size() == config.groups.size() &&
      CheckChange(*saved_rules_, config, /*replace=*/true).ok();
  if (are_saved) return Status::Ok();
  PERSIA_RETURN_IF_ERROR(SaveRules(tier_directory_, {tier_->pool().id(), config}));
  saved_rules_ = config;
  return Status::Ok();
}

void EmbeddingStore::Impl::MaintainTier() {
  while (tier_->WaitForWork()) {
    // A checkpoint may need no room, and leaves some: it is tried also where there is none.
    bool has_more = false;
    const Status cache = ShrinkCaches(&has_more);
    uint64_t batch = 0;
    const Status checkpoints = AdvanceCheckpoints(&batch);
    tier_->Fail(cache);
    tier_->Fail(checkpoints);
    tier_->NoteRound(cache, checkpoints, batch, has_more);
  }
}

// Where one shard finds no room, others may need none. Returns the first error. *has_more: there is
// memory to give back, later.
Status EmbeddingStore::Impl::ShrinkCaches(bool* has_more_memory) {
  Status first_error;
  for (Shard& shard : shards_) {
    StatusOr<bool> has_more = true;
    while (has_more.ok() && *has_more && !tier_->is_stopping()) {
      const std::shared_lock in_store(in_place_mutex_);
      has_more = shard.cache()->Shrink();
    }
    *has_more_memory |= GiveBackMemory(&shard);
    if (first_error.ok()) first_error = has_more.status();
  }
  return first_error;
}

bool EmbeddingStore::Impl::GiveBackMemory(Shard* shard) {
  uint64_t next = 0;
  auto progress = RowCache::GiveBack::kMore;
  while (progress == RowCache::GiveBack::kMore && !tier_->is_stopping()) {
    const std::shared_lock in_store(in_place_mutex_);
    progress = shard->cache()->GiveBackMemory(&next);
  }
  return progress == RowCache::GiveBack::kLater;
}

// Once a checkpoint has begun, no row changes up to it any more: one pass over the rows is enough.
// *last: the one that the answer is of.
Status EmbeddingStore::Impl::AdvanceCheckpoints(uint64_t* last) {
  while (const auto batch = tier_->pool().oldest_pending()) {
    *last = *batch;
    if (tier_->IsPrepared(*batch)) return Status::Ok();  // whoever holds it has the word
    for (Shard& shard : shards_) {
      uint64_t next = 0;
      StatusOr<bool> has_more = true;
      while (*has_more) {
        if (tier_->is_stopping()) return Status::Ok();
        const std::shared_lock in_store(in_place_mutex_);
        has_more = shard.cache()->WriteBackUpTo(*batch, &next);
        PERSIA_RETURN_IF_ERROR(has_more.status());
        tier_->Fail(shard.cache()->Shrink().status());
      }
    }
    PERSIA_RETURN_IF_ERROR(tier_->EndCheckpoint(*batch));
  }
  return Status::Ok();
}

void EmbeddingStore::Impl::FetchAhead() {
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  std::vector<uint64_t> signs;
  std::vector<std::vector<uint64_t>> keys(num_shards);
  while (tier_->read_ahead().Take(&signs)) {
    for (const uint64_t sign : signs) {
      const uint64_t key = SignKey(sign);
      keys[ShardOfKey(key, num_shards)].push_back(key);
    }
    for (uint32_t i = 0; i < num_shards; ++i) {
      FetchAhead(i, keys[i]);
      keys[i].clear();
    }
    tier_->WakeIfOverBudget();
  }
}

void EmbeddingStore::Impl::FetchAhead(uint32_t shard_number, std::span<const uint64_t> keys) {
  for (size_t begin = 0; begin < keys.size(); begin += kAheadAtATime) {
    const std::shared_lock in_store(in_place_mutex_);
    const auto step = keys.subspan(begin, std::min(kAheadAtATime, keys.size() - begin));
    if (tier_->is_stopping() || !shards_[shard_number].cache()->Prefetch(step).ok()) return;
  }
}

void EmbeddingStore::Impl::StopThreads() {
  if (tier_ == nullptr) return;
  tier_->Stop();
  if (maintenance_thread_.joinable()) maintenance_thread_.join();
  if (prefetch_thread_.joinable()) prefetch_thread_.join();
}

StatusOr<Tier*> EmbeddingStore::Impl::RequireTier() const {
  if (tier_ != nullptr) return tier_.get();
  return FailedPrecondition("the rows of this store are in memory alone: it has no tier");
}

Status EmbeddingStore::WaitCheckpoint(uint64_t batch, std::chrono::milliseconds timeout) const {
  auto tier = impl_->RequireTier();
  PERSIA_RETURN_IF_ERROR(tier.status());
  return (*tier)->WaitCheckpoint(batch, timeout);
}

void EmbeddingStore::Prefetch(std::span<const uint64_t> signs) {
  if (impl_->tier() != nullptr) impl_->tier()->read_ahead().Add(signs);
}

bool EmbeddingStore::WantsPrefetch() const {
  return impl_->tier() != nullptr && !impl_->tier()->pool().is_mapped();
}

StatusOr<uint64_t> EmbeddingStore::RequestCheckpoint(bool held) {
  auto tier = impl_->RequireTier();
  PERSIA_RETURN_IF_ERROR(tier.status());
  if (!config()) {
    return Status(StatusCode::kFailedPrecondition,
                  "no optimizer yet, and so no rows: a TrainCtx that is entered configures it; "
                  "dump after that");
  }
  const std::unique_lock lock(impl_->in_place_mutex());
  auto batch = (*tier)->BeginCheckpoint(held);
  if (batch.ok()) (*tier)->Wake();
  return batch;
}

StatusOr<std::optional<pool::PreparedCheckpoint>> EmbeddingStore::PreparedCheckpoint(
    uint64_t number) const {
  auto tier = impl_->RequireTier();
  PERSIA_RETURN_IF_ERROR(tier.status());
  return (*tier)->PreparedHeld(number);
}

Status EmbeddingStore::CommitCheckpoint(uint64_t number) {
  auto tier = impl_->RequireTier();
  PERSIA_RETURN_IF_ERROR(tier.status());
  // Not in the store: the device may take its time, and training must not wait for it.
  PERSIA_RETURN_IF_ERROR((*tier)->CommitHeld(number));
  (*tier)->Wake();  // for checkpoints behind it
  return Status::Ok();
}

Status EmbeddingStore::DropCheckpoint(uint64_t number) {
  auto tier = impl_->RequireTier();
  PERSIA_RETURN_IF_ERROR(tier.status());
  const std::shared_lock in_store(impl_->in_place_mutex());
  PERSIA_RETURN_IF_ERROR((*tier)->DropHeld(number));
  (*tier)->Wake();
  return Status::Ok();
}

std::optional<TierStats> EmbeddingStore::tier_stats() const {
  if (impl_->tier() == nullptr) return std::nullopt;
  const std::shared_lock in_store(impl_->in_place_mutex());
  TierStats stats;
  for (const Shard& shard : impl_->shards()) shard.cache()->AddStatsTo(&stats);
  stats.memory_bytes = impl_->ShardStats().memory_bytes;
  stats.num_unheeded = impl_->tier()->read_ahead().num_dropped();
  stats.last_error = impl_->tier()->last_error();
  stats.batch = impl_->tier()->batch();
  stats.pool = impl_->tier()->pool().stats();
  return stats;
}

}  // namespace persia::store

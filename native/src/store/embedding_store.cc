#include "store/embedding_store.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>

#include "store/config_change.h"
#include "store/row_policies.h"
#include "store/store_impl.h"

namespace persia::store {
namespace {

Status RefuseOption(std::string_view field, uint64_t value, std::string_view remedy) {
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + "; " +
                         std::string(remedy));
}

Status CheckCache(const TierOptions& tier, uint32_t num_shards) {
  const std::string remedy = " for each of the " + std::to_string(num_shards) + " internal shards";
  if (tier.cache_bytes == 0) {
    if (tier.cache_rows >= num_shards) return Status::Ok();
    return RefuseOption("cache_rows", tier.cache_rows, "give at least one row" + remedy);
  }
  if (tier.cache_rows != 0) {
    return RefuseOption("cache_rows", tier.cache_rows, "leave it out beside cache_bytes");
  }
  if (tier.cache_bytes / 1024 >= num_shards) return Status::Ok();
  return RefuseOption("cache_bytes", tier.cache_bytes, "give at least 1 KiB" + remedy);
}

// Of all shards together: bytes of the counters of sightings, where they are wanted.
constexpr uint64_t kFilterCells = uint64_t{1} << 24;

}  // namespace

Status EmbeddingStore::Impl::CheckCapacities(const RowPolicies& policies) const {
  for (const auto& [group, capacity] : policies.capacities()) {
    if (capacity >= shards_.size()) continue;
    return InvalidArgument("feature group " + std::to_string(group) + ": capacity is " +
                           std::to_string(capacity) + "; give at least " +
                           std::to_string(shards_.size()) +
                           ", one row for each internal shard, or fewer shards");
  }
  return Status::Ok();
}

// Nobody else is in the store: whether rows exist, and with it whether the change is allowed, must
// not change half-way.
Status EmbeddingStore::Impl::Configure(const TrainConfig& config, bool replace) {
  const std::unique_lock lock(in_place_mutex_);
  return ConfigureAlone(config, replace);
}

Status EmbeddingStore::Impl::ConfigureAlone(const TrainConfig& config, bool replace) {
  PERSIA_RETURN_IF_ERROR(config.Validate());
  const std::lock_guard config_lock(config_mutex_);
  if (config_ == config) {
    is_config_recovered_ = false;
    return Status::Ok();
  }
  const auto policies = std::make_shared<const RowPolicies>(config, row_dtype_);
  const uint64_t num_filter_cells =
      policies->CountsSightings() ? kFilterCells / std::bit_ceil(shards_.size()) : 0;
  PERSIA_RETURN_IF_ERROR(CheckCapacities(*policies));
  const bool has_rows = std::any_of(shards_.begin(), shards_.end(),
                                    [](const Shard& shard) { return shard.size() != 0; });
  if (has_rows) {
    PERSIA_RETURN_IF_ERROR(CheckChange(*config_, config, replace || is_config_recovered_));
  } else if (tier_ != nullptr && tier_->pool().HasRowsInCheckpoints()) {
    // They may come back, and are read by the rules that are saved then.
    PERSIA_RETURN_IF_ERROR(CheckChange(*config_, config, /*replace=*/true));
  }
  if (tier_ != nullptr) PERSIA_RETURN_IF_ERROR(SaveRulesIfNew(config));
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  for (uint32_t i = 0; i < num_shards; ++i) {
    shards_[i].SetPolicies(policies, num_filter_cells, i, num_shards);
  }
  if (!has_rows) ForgetSlabs();
  config_ = config;
  is_config_recovered_ = false;
  is_configured_.store(true, std::memory_order_release);
  return Status::Ok();
}

StatusOr<std::unique_ptr<EmbeddingStore>> EmbeddingStore::Open(const Options& options,
                                                               const TierOptions& tier) {
  auto store = Create(options);
  PERSIA_RETURN_IF_ERROR(store.status());
  PERSIA_RETURN_IF_ERROR(CheckCache(tier, options.num_internal_shards));
  if (options.counts_updates) {
    return InvalidArgument("counts_updates is set; a store with a tier does not count them");
  }
  if (options.row_dtype != RowDtype::kFloat32) {
    return InvalidArgument(
        "row_dtype is not float32; rows in a pool are: choose float32, or a store in memory");
  }
  PERSIA_RETURN_IF_ERROR((*store)->impl_->OpenTier(tier));
  return store;
}

StatusOr<std::unique_ptr<EmbeddingStore>> EmbeddingStore::Create(const Options& options) {
  constexpr uint32_t kMaxShards = 65536;
  if (options.capacity == 0) return RefuseOption("capacity", 0, "give at least 1 row");
  if (options.num_internal_shards == 0 || options.num_internal_shards > kMaxShards) {
    return RefuseOption("num_internal_shards", options.num_internal_shards, "give 1 to 65536");
  }
  if (options.num_internal_shards > options.capacity) {
    return RefuseOption("num_internal_shards", options.num_internal_shards,
                        "give at most the capacity, which is " + std::to_string(options.capacity));
  }
  return std::unique_ptr<EmbeddingStore>(new EmbeddingStore(std::make_unique<Impl>(options)));
}

EmbeddingStore::EmbeddingStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EmbeddingStore::~EmbeddingStore() = default;

Status EmbeddingStore::Configure(const TrainConfig& config, bool replace) {
  return impl_->Configure(config, replace);
}

std::optional<TrainConfig> EmbeddingStore::config() const { return impl_->config(); }

Status EmbeddingStore::Lookup(std::span<const RowBlock> blocks, LookupMode mode, float* rows,
                              LookupReport* report) {
  if (mode == LookupMode::kTrain && !impl_->IsConfigured()) {
    return FailedPrecondition("a training lookup came before Configure; configure the store first");
  }
  PERSIA_RETURN_IF_ERROR(impl_->CheckTier());
  const auto in_store = mode == LookupMode::kTrain ? impl_->EnterForChange()
                                                   : std::shared_lock(impl_->in_place_mutex());
  LookupReport counts;
  const Status status = impl_->ForEachShard(blocks, [&](Shard& shard, std::span<const Run> runs) {
    return shard.Lookup(runs, mode, rows, &counts);
  });
  if (report != nullptr) *report = counts;
  return status;
}

Status EmbeddingStore::Update(std::span<const RowBlock> blocks, const float* gradients,
                              UpdateReport* report) {
  PERSIA_RETURN_IF_ERROR(impl_->CheckTier());
  const auto in_store = impl_->EnterForChange();
  UpdateReport counts;
  const auto prepare = [&](Shard& shard, std::span<const Run> runs) {
    return shard.PrepareUpdate(runs);
  };
  const auto update = [&](Shard& shard, std::span<const Run> runs) {
    return shard.Update(runs, gradients, &counts);
  };
  // What fails for want of room fails before any gradient is applied: the call may be repeated.
  const Status status = impl_->tier() == nullptr ? impl_->ForEachShard(blocks, update)
                                                 : impl_->ForEachShard(blocks, prepare, update);
  if (status.ok()) impl_->CountUpdate();
  if (report != nullptr) *report = counts;
  return status;
}

Status EmbeddingStore::SetRows(std::span<const RowBlock> blocks, const float* rows) {
  if (!impl_->IsConfigured()) {
    return FailedPrecondition("rows were set before Configure; configure the store first");
  }
  PERSIA_RETURN_IF_ERROR(impl_->CheckTier());
  const auto in_store = impl_->EnterForChange();
  return impl_->ForEachShard(
      blocks, [&](Shard& shard, std::span<const Run> runs) { return shard.SetRows(runs, rows); });
}

// Not during a snapshot: each row that goes would have to be saved for it first.
StatusOr<uint64_t> EmbeddingStore::RemoveSmallRows() {
  constexpr size_t kRowsAtATime = 512;
  const auto config = impl_->config();
  if (!config.has_value() || !config->HasMinNorm()) return uint64_t{0};
  PERSIA_RETURN_IF_ERROR(impl_->Occupy("removal of small rows"));
  uint64_t num_removed = 0;
  Status status;
  for (Shard& shard : impl_->shards()) {
    uint64_t next = 0;
    StatusOr<bool> has_more = true;
    while (has_more.ok() && *has_more) {
      const std::shared_lock in_store(impl_->in_place_mutex());
      if (impl_->tier() != nullptr) impl_->tier()->CountBatch();  // rows change
      has_more = shard.RemoveSmallRows(kRowsAtATime, &next, &num_removed);
    }
    status = has_more.status();
    if (!status.ok()) break;
  }
  impl_->Release();
  if (!status.ok()) return status;
  return num_removed;
}

uint64_t EmbeddingStore::size() const {
  const std::shared_lock in_store(impl_->in_place_mutex());
  uint64_t rows = 0;
  for (const Shard& shard : impl_->shards()) rows += shard.size();
  return rows;
}

Status EmbeddingStore::NumUpdates(std::span<const uint64_t> signs,
                                  std::span<uint32_t> counts) const {
  if (!impl_->counts_updates()) {
    return FailedPrecondition(
        "the store does not count updates: set counts_updates when it is made");
  }
  const std::shared_lock in_store(impl_->in_place_mutex());
  auto& shards = impl_->shards();
  for (size_t i = 0; i < signs.size(); ++i) {
    const uint64_t key = SignKey(signs[i]);
    counts[i] = shards[ShardOfKey(key, static_cast<uint32_t>(shards.size()))].NumUpdates(key);
  }
  return Status::Ok();
}

StoreStats EmbeddingStore::stats() const {
  const std::shared_lock in_store(impl_->in_place_mutex());
  StoreStats stats = impl_->ShardStats();
  if (impl_->tier() != nullptr) stats.memory_bytes += impl_->tier()->memory_bytes();
  if (impl_->changes() != nullptr) stats.memory_bytes += impl_->changes()->memory_bytes();
  return stats;
}

void EmbeddingStore::Clear() {
  if (impl_->tier() != nullptr) {
    const std::unique_lock lock(impl_->in_place_mutex());
    impl_->tier()->Fail(impl_->ClearRows());
    return;
  }
  const std::shared_lock in_store(impl_->in_place_mutex());
  static_cast<void>(impl_->ClearRows());  // fails in a pool alone
}

// Not during a snapshot: changes that it has taken may have to come back.
Status EmbeddingStore::TrackChanges(uint64_t max_rows) {
  if (max_rows > ChangeSet::kMaxKeys) {
    return RefuseOption(
        "max_rows", max_rows,
        "give at most " + std::to_string(ChangeSet::kMaxKeys) + ", or 0 to track no changes");
  }
  PERSIA_RETURN_IF_ERROR(impl_->Occupy("tracking of changes"));
  auto changes = max_rows == 0 ? nullptr : std::make_unique<ChangeSet>(max_rows);
  {
    const std::unique_lock lock(impl_->in_place_mutex());
    impl_->ReplaceChanges(std::move(changes));
  }
  impl_->Release();
  return Status::Ok();
}

ChangeStatus EmbeddingStore::change_status() const {
  const std::shared_lock in_store(impl_->in_place_mutex());
  const ChangeSet* changes = impl_->changes();
  if (changes == nullptr) return {};
  return {.max_rows = changes->max_keys(),
          .num_rows = changes->size(),
          .is_due = changes->size() >= changes->max_keys() / 2,
          .has_overflowed = changes->has_overflowed()};
}

}  // namespace persia::store

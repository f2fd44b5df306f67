#include "store/shard_set.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "store/row_policy.h"

namespace persia::store {
namespace {

// Counters of sightings in all shards together, one byte each, where policies want them.
constexpr uint64_t kFilterCells = uint64_t{1} << 24;

}  // namespace

// A flag and not a mutex: the holder may release it in another thread, and others must not wait for
// what takes minutes.
Status SharedFeatures::Occupy(const char* by) {
  const char* holder = nullptr;
  if (occupied_by_.compare_exchange_strong(holder, by)) return Status::Ok();
  return FailedPrecondition(holder, " of this store is under way, and so ", by,
                            " cannot begin; close it first");
}

ShardSet::ShardSet(const Options& options) : options_(options) {
  const uint64_t num_shards = options.num_internal_shards;
  for (uint64_t i = 0; i < num_shards; ++i) {
    const uint64_t capacity =
        options.capacity / num_shards + (i < options.capacity % num_shards ? 1 : 0);
    // Apart, so that the indexes of shards that fill side by side do not all grow at once.
    const double growth_phase = static_cast<double>(i) / static_cast<double>(num_shards);
    shards_.emplace_back(capacity, &slab_memory_, &cold_memory_, growth_phase,
                         options.counts_updates, options.row_dtype);
  }
}

std::shared_lock<WriterFirstMutex> ShardSet::EnterForChange() {
  features_.snapshot_budget.WaitForRoom();
  std::shared_lock lock(mutex_);
  // Under the lock: the change must not count for a checkpoint that it waited for.
  if (tier_ != nullptr) tier_->CountBatch();
  return lock;
}

std::unique_lock<WriterFirstMutex> ShardSet::LockForChange() {
  features_.snapshot_budget.WaitForRoom();
  return std::unique_lock(mutex_);
}

// By a mutex of its own: a script asks for it while a batch has the store's.
std::optional<TrainConfig> ShardSet::config() const {
  const std::lock_guard lock(config_mutex_);
  return config_;
}

Status ShardSet::CheckCapacities(const RowPolicies& policies) const {
  for (const auto& [group, capacity] : policies.capacities()) {
    if (capacity >= shards_.size()) continue;
    return InvalidArgument("feature group ", group, ": capacity is ", capacity, "; give at least ",
                           shards_.size(), ", one row for each internal shard, or fewer shards");
  }
  return Status::Ok();
}

// Locked: whether rows exist, and with it whether the change is allowed, must not change half-way.
Status ShardSet::Configure(const TrainConfig& config, bool replace, bool is_recovered) {
  PERSIA_RETURN_IF_ERROR(config.Validate());
  const std::lock_guard config_lock(config_mutex_);
  if (config_ == config) {
    is_config_recovered_ = is_recovered;
    return Status::Ok();
  }
  // Immutable, and shared by all shards.
  const auto policies = std::make_shared<const RowPolicies>(config, options_.row_dtype);
  const uint64_t num_filter_cells =
      policies->CountsSightings() ? kFilterCells / std::bit_ceil(shards_.size()) : 0;
  PERSIA_RETURN_IF_ERROR(CheckCapacities(*policies));
  const bool has_rows = std::any_of(shards_.begin(), shards_.end(),
                                    [](const Shard& shard) { return shard.size() != 0; });
  if (has_rows) {
    PERSIA_RETURN_IF_ERROR(CheckChange(*config_, config, replace || is_config_recovered_));
  } else if (tier_ != nullptr && tier_->pool().HasRowsInCheckpoints()) {
    // Those rows may be recovered, and are then read by the policies that are saved now.
    PERSIA_RETURN_IF_ERROR(CheckChange(*config_, config, /*replace=*/true));
  }
  std::shared_ptr<RowArrays> arrays = arrays_;
  if (!has_rows) {
    PERSIA_ASSIGN_OR_RETURN(arrays, MakeArrays(*policies));
  }
  // Before rows are made by it: a crash in between must find the config of every row it recovers.
  if (tier_ != nullptr) PERSIA_RETURN_IF_ERROR(tier_->SaveConfigIfNew(config));
  arrays_ = std::move(arrays);
  for (uint32_t i = 0; i < count(); ++i) {
    shards_[i].SetPolicies(policies, num_filter_cells, arrays_, i, count());
  }
  if (!has_rows) ForgetSlabs();
  config_ = config;
  is_config_recovered_ = is_recovered;
  is_configured_.store(true, std::memory_order_release);
  return Status::Ok();
}

// Locked exclusively, so that no shard adds to the former set any more.
std::unique_ptr<ChangeSet> ShardSet::ReplaceChanges(std::unique_ptr<ChangeSet> changes) {
  features_.changes.swap(changes);
  for (Shard& shard : shards_) shard.features().changes = features_.changes.get();
  return changes;
}

// The tier first: where it fails, all rows stay. Changes before rows: a key that is added in
// between may be that of a row which a shard inserts after its own clear.
Status ShardSet::Clear() {
  if (tier_ != nullptr) PERSIA_RETURN_IF_ERROR(tier_->Clear());
  if (features_.changes != nullptr) features_.changes->NoteClear();
  // New arrays, so that a snapshot can take the old ones over with the index. Without addresses for
  // them, rows are found by hash from now on.
  if (!options_.arrays.empty() && is_configured_) {
    auto arrays = MakeArrays(*shards_[0].table().policies());
    arrays_ = arrays.ok() ? std::move(arrays).value() : std::make_shared<RowArrays>();
  }
  for (Shard& shard : shards_) shard.Clear(arrays_);
  ForgetSlabs();
  NoteReplacement();
  return Status::Ok();
}

StatusOr<std::shared_ptr<RowArrays>> ShardSet::MakeArrays(const RowPolicies& policies) const {
  return RowArrays::Make(options_.arrays, policies,
                         options_.counts_updates ? kUpdateCountFloats : 0);
}

void ShardSet::ForgetSlabs() {
  slab_memory_.Clear();
  cold_memory_.Clear();
}

StoreStats ShardSet::Stats() const {
  StoreStats stats;
  for (const Shard& shard : shards_) shard.AddStatsTo(&stats);
  stats.memory_bytes +=
      slab_memory_.unused_bytes() + cold_memory_.unused_bytes() + arrays_->memory_bytes();
  return stats;
}

}  // namespace persia::store

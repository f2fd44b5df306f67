#include "store/embedding_store.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "store/batch_plan.h"
#include "store/row_rules.h"
#include "store/shard.h"

namespace persia::store {
namespace {

Status RefuseOption(std::string_view field, uint64_t value, std::string_view remedy) {
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + "; " +
                         std::string(remedy));
}

// The first field that differs and may not while rows exist; empty
// when there is none. Whatever shapes a row or gives its state a
// meaning is fixed; `replace` frees what only steers the next step.
std::string_view FixedFieldThatDiffers(const TrainConfig& a, const TrainConfig& b) {
  const OptimizerConfig &x = a.optimizer, &y = b.optimizer;
  if (a.initializer != b.initializer) return "initializer";
  if (x.kind != y.kind) return "optimizer.kind";
  if (x.momentum != y.momentum) return "optimizer.momentum";
  if (x.initial_accumulator_value != y.initial_accumulator_value) {
    return "optimizer.initial_accumulator_value";
  }
  if (x.g_square_momentum != y.g_square_momentum) return "optimizer.g_square_momentum";
  if (x.eps != y.eps) return "optimizer.eps";
  if (x.beta1 != y.beta1) return "optimizer.beta1";
  if (x.beta2 != y.beta2) return "optimizer.beta2";
  return {};
}

std::string_view ReplaceableFieldThatDiffers(const TrainConfig& a, const TrainConfig& b) {
  if (a.optimizer.lr != b.optimizer.lr) return "optimizer.lr";
  if (a.optimizer.weight_decay != b.optimizer.weight_decay) return "optimizer.weight_decay";
  if (a.weight_bound != b.weight_bound) return "weight_bound";
  return "admit_probability";
}

Status CheckChange(const TrainConfig& old_config, const TrainConfig& new_config, bool replace) {
  if (const auto field = FixedFieldThatDiffers(old_config, new_config); !field.empty()) {
    return FailedPrecondition(std::string(field) +
                              " differs from the configuration that the existing rows were made "
                              "with; clear the rows first, or use the same");
  }
  if (replace) return Status::Ok();
  return FailedPrecondition(
      std::string(ReplaceableFieldThatDiffers(old_config, new_config)) +
      " differs from the configuration in use; ask for a replacement to change it while there are "
      "rows, or use the same");
}

BatchPlan& ThreadPlan() {
  thread_local BatchPlan plan;
  return plan;
}

}  // namespace

class EmbeddingStore::Impl {
 public:
  explicit Impl(const Options& options) {
    const uint64_t num_shards = options.num_internal_shards;
    for (uint64_t i = 0; i < num_shards; ++i) {
      shards_.emplace_back(options.capacity / num_shards +
                           (i < options.capacity % num_shards ? 1 : 0));
    }
  }

  Status Configure(const TrainConfig& config, bool replace);
  std::optional<TrainConfig> config() const {
    std::lock_guard lock(config_mutex_);
    return config_;
  }
  // Once true it stays true, and then every shard has rules.
  bool IsConfigured() const { return is_configured_.load(std::memory_order_acquire); }

  // Calls handle(shard, runs) for every shard that the request touches; stops at the first failure.
  template <typename Handle>
  Status ForEachShard(std::span<const RowBlock> blocks, Handle handle);

  std::deque<Shard>& shards() { return shards_; }

 private:
  std::deque<Shard> shards_;
  mutable std::mutex config_mutex_;  // taken before any shard's
  std::optional<TrainConfig> config_;
  std::atomic<bool> is_configured_ = false;
  std::atomic<uint32_t> next_first_shard_ = 0;
};

// All shards are locked at once: whether rows exist, and with it
// whether the change is allowed, must not change half-way. Batches
// hold one shard's mutex at a time, so they cannot deadlock with this.
Status EmbeddingStore::Impl::Configure(const TrainConfig& config, bool replace) {
  PERSIA_RETURN_IF_ERROR(config.Validate());
  std::lock_guard config_lock(config_mutex_);
  if (config_ == config) return Status::Ok();
  const auto rules = std::make_shared<const RowRules>(config);
  std::vector<std::unique_lock<std::mutex>> locks;
  locks.reserve(shards_.size());
  for (Shard& shard : shards_) locks.emplace_back(shard.mutex());
  const bool has_rows = std::any_of(shards_.begin(), shards_.end(),
                                    [](const Shard& shard) { return !shard.IsEmptyLocked(); });
  if (has_rows) PERSIA_RETURN_IF_ERROR(CheckChange(*config_, config, replace));
  for (Shard& shard : shards_) shard.SetRulesLocked(rules);
  config_ = config;
  is_configured_.store(true, std::memory_order_release);
  return Status::Ok();
}

template <typename Handle>
Status EmbeddingStore::Impl::ForEachShard(std::span<const RowBlock> blocks, Handle handle) {
  BatchPlan& plan = ThreadPlan();
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  PERSIA_RETURN_IF_ERROR(plan.Build(blocks, num_shards));
  // Each call starts elsewhere, so that calls at the same time do not queue up at every shard.
  const uint32_t first = next_first_shard_.fetch_add(1, std::memory_order_relaxed) % num_shards;
  for (uint32_t i = 0; i < num_shards; ++i) {
    const uint32_t shard = (first + i) % num_shards;
    if (plan.IsEmpty(shard)) continue;
    PERSIA_RETURN_IF_ERROR(handle(shards_[shard], plan.RunsOf(shard)));
  }
  return Status::Ok();
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
  LookupReport counts;
  const Status status = impl_->ForEachShard(blocks, [&](Shard& shard, std::span<const Run> runs) {
    return shard.Lookup(runs, mode, rows, &counts);
  });
  if (report != nullptr) *report = counts;
  return status;
}

Status EmbeddingStore::Update(std::span<const RowBlock> blocks, const float* gradients,
                              UpdateReport* report) {
  UpdateReport counts;
  const Status status = impl_->ForEachShard(blocks, [&](Shard& shard, std::span<const Run> runs) {
    shard.Update(runs, gradients, &counts);
    return Status::Ok();
  });
  if (report != nullptr) *report = counts;
  return status;
}

Status EmbeddingStore::SetRows(std::span<const RowBlock> blocks, const float* rows) {
  if (!impl_->IsConfigured()) {
    return FailedPrecondition("rows were set before Configure; configure the store first");
  }
  return impl_->ForEachShard(
      blocks, [&](Shard& shard, std::span<const Run> runs) { return shard.SetRows(runs, rows); });
}

uint64_t EmbeddingStore::size() const {
  uint64_t rows = 0;
  for (const Shard& shard : impl_->shards()) rows += shard.size();
  return rows;
}

StoreStats EmbeddingStore::stats() const {
  StoreStats stats;
  for (const Shard& shard : impl_->shards()) shard.AddStatsTo(&stats);
  return stats;
}

void EmbeddingStore::Clear() {
  for (Shard& shard : impl_->shards()) shard.Clear();
}

}  // namespace persia::store

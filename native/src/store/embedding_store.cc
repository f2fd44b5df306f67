#include "store/embedding_store.h"

#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>

namespace persia::store {
namespace {

Status RefuseOption(std::string_view field, uint64_t value, std::string_view remedy) {
  return InvalidArgument(field, " is ", value, "; ", remedy);
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

}  // namespace

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
  return std::unique_ptr<EmbeddingStore>(new EmbeddingStore(options));
}

// What a tier cannot keep is refused here: its records have no place for a count of updates, and
// their checksums and readers know float32 alone.
StatusOr<std::unique_ptr<EmbeddingStore>> EmbeddingStore::Open(const Options& options,
                                                               const TierOptions& tier) {
  PERSIA_ASSIGN_OR_RETURN(auto store, Create(options));
  PERSIA_RETURN_IF_ERROR(CheckCache(tier, options.num_internal_shards));
  if (options.counts_updates) {
    return InvalidArgument("counts_updates is set; a store with a tier does not count them");
  }
  if (options.row_dtype != RowDtype::kFloat32) {
    return InvalidArgument(
        "row_dtype is not float32; rows in a pool are: choose float32, or a store in memory");
  }
  PERSIA_RETURN_IF_ERROR(store->tier_.Open(tier));
  return store;
}

Status EmbeddingStore::Configure(const TrainConfig& config, bool replace) {
  const std::unique_lock lock(shards_.mutex());
  return shards_.Configure(config, replace);
}

Status EmbeddingStore::Lookup(std::span<const RowBlock> blocks, LookupMode mode, float* rows,
                              LookupReport* report) {
  if (mode == LookupMode::kTrain && !shards_.IsConfigured()) {
    return FailedPrecondition("a training lookup came before Configure; configure the store first");
  }
  // A tier that has failed answers nothing, not even what is in memory: its rows may be newer than
  // any checkpoint, and a job that continued would only find out later.
  PERSIA_RETURN_IF_ERROR(shards_.CheckTier());
  // Inference saves no rows, so it does not wait for a snapshot that needs room.
  const auto lock =
      mode == LookupMode::kTrain ? shards_.EnterForChange() : std::shared_lock(shards_.mutex());
  LookupReport counts;
  // A store that is only filled has no updates to remember lookups for.
  const bool has_updates = shards_.features().num_updates.load(std::memory_order_relaxed) > 0;
  const Status status = mode == LookupMode::kTrain && shards_.tier() == nullptr && has_updates
                            ? LookupAndRemember(blocks, rows, &counts)
                            : shards_.ForEach(blocks, [&](Shard& shard, std::span<const Run> runs) {
                                return shard.Lookup(runs, mode, rows, &counts);
                              });
  if (report != nullptr) *report = counts;
  return status;
}

Status EmbeddingStore::LookupAndRemember(std::span<const RowBlock> blocks, float* rows,
                                         LookupReport* counts) {
  std::unique_ptr<FoundRows> found = recent_.Begin();
  Status status = found->signs.Build(blocks, shards_.count());
  if (!status.ok()) return status;
  found->Begin(shards_.count());
  const auto look_up = [&](Shard& shard, uint32_t number, std::span<const Run> runs) {
    return shard.Lookup(runs, LookupMode::kTrain, rows, counts, &found->cells_by_shard[number]);
  };
  PERSIA_RETURN_IF_ERROR(shards_.ForEachOf(&found->signs, look_up));
  recent_.Keep(blocks, std::move(found));
  return Status::Ok();
}

Status EmbeddingStore::UpdateFound(std::span<const RowBlock> blocks, const float* gradients,
                                   UpdateReport* counts) {
  std::unique_ptr<FoundRows> found = recent_.Take(blocks);
  if (found == nullptr) {
    return shards_.ForEach(blocks, [&](Shard& shard, std::span<const Run> runs) {
      return shard.Update(runs, gradients, counts);
    });
  }
  const auto update = [&](Shard& shard, uint32_t number, std::span<const Run> runs) {
    return shard.Update(runs, gradients, counts, &found->cells_by_shard[number]);
  };
  const Status status = shards_.ForEachOf(&found->signs, update);
  recent_.End(std::move(found));
  return status;
}

Status EmbeddingStore::Update(std::span<const RowBlock> blocks, const float* gradients,
                              UpdateReport* report) {
  PERSIA_RETURN_IF_ERROR(shards_.CheckTier());
  const auto lock = shards_.EnterForChange();
  UpdateReport counts;
  const auto prepare = [&](Shard& shard, std::span<const Run> runs) {
    return shard.cache()->PrepareUpdate(runs);
  };
  const auto update = [&](Shard& shard, std::span<const Run> runs) {
    return shard.Update(runs, gradients, &counts);
  };
  // What fails for want of room fails before any gradient is applied: the call may be repeated.
  const Status status = shards_.tier() == nullptr ? UpdateFound(blocks, gradients, &counts)
                                                  : shards_.ForEach(blocks, prepare, update);
  // Under the store's lock: a snapshot point sees an update whole, in the rows and in this number.
  if (status.ok()) ++shards_.features().num_updates;
  if (report != nullptr) *report = counts;
  return status;
}

// As a training batch: rows that are set become the newest, and a batch of them evicts none of its
// own.
Status EmbeddingStore::SetRows(std::span<const RowBlock> blocks, const float* rows) {
  if (!shards_.IsConfigured()) {
    return FailedPrecondition("rows were set before Configure; configure the store first");
  }
  PERSIA_RETURN_IF_ERROR(shards_.CheckTier());
  const auto lock = shards_.EnterForChange();
  const Status status = shards_.ForEach(
      blocks, [&](Shard& shard, std::span<const Run> runs) { return shard.SetRows(runs, rows); });
  shards_.NoteReplacement();
  return status;
}

uint64_t EmbeddingStore::size() const {
  const std::shared_lock lock(shards_.mutex());
  uint64_t rows = 0;
  for (const Shard& shard : shards_.all()) rows += shard.size();
  return rows;
}

// One sign at a time: for diagnosis, not for the path of a batch.
Status EmbeddingStore::NumUpdates(std::span<const uint64_t> signs,
                                  std::span<uint32_t> counts) const {
  if (!shards_.counts_updates()) {
    return FailedPrecondition(
        "the store does not count updates: set counts_updates when it is made");
  }
  const std::shared_lock lock(shards_.mutex());
  for (size_t i = 0; i < signs.size(); ++i) {
    const uint64_t key = SignKey(signs[i]);
    const Shard& shard = shards_.all()[ShardOfKey(key, shards_.count())];
    const std::lock_guard shard_lock(shard.mutex());
    const RowSlabs& slabs = shard.table().slabs();
    const SignIndex::Entry* entry = shard.table().index().Find(key);
    counts[i] =
        entry == nullptr ? 0 : UpdateCountOf(slabs.values(entry->cell), slabs.shape(entry->cell));
  }
  return Status::Ok();
}

StoreStats EmbeddingStore::stats() const {
  const std::shared_lock lock(shards_.mutex());
  StoreStats stats = shards_.Stats();
  stats.memory_bytes += recent_.memory_bytes();
  if (const StoreTier* tier = shards_.tier()) stats.memory_bytes += tier->memory_bytes();
  if (const auto& changes = shards_.features().changes) {
    // Once for the store: shards only point to the set.
    stats.memory_bytes += changes->memory_bytes();
  }
  return stats;
}

// Shards are cleared one after another while calls proceed, but for what they share: rows and
// checkpoints of a tier must disappear in one step, and so must arrays.
void EmbeddingStore::Clear() {
  if (shards_.ClearsAtOnce()) {
    const std::unique_lock lock(shards_.mutex());
    const Status status = shards_.Clear();
    if (shards_.tier() != nullptr) shards_.tier()->Fail(status);
    return;
  }
  const std::shared_lock lock(shards_.mutex());
  static_cast<void>(shards_.Clear());  // only a tier can fail
}

// Not during a snapshot: changes that it has taken may have to be returned.
Status EmbeddingStore::TrackChanges(uint64_t max_rows) {
  if (max_rows > ChangeSet::kMaxKeys) {
    return RefuseOption(
        "max_rows", max_rows,
        "give at most " + std::to_string(ChangeSet::kMaxKeys) + ", or 0 to track no changes");
  }
  PERSIA_RETURN_IF_ERROR(shards_.features().Occupy("tracking of changes"));
  auto changes = max_rows == 0 ? nullptr : std::make_unique<ChangeSet>(max_rows);
  {
    const std::unique_lock lock(shards_.mutex());
    shards_.ReplaceChanges(std::move(changes));
  }
  shards_.features().Release();
  return Status::Ok();
}

ChangeStatus EmbeddingStore::change_status() const {
  const std::shared_lock lock(shards_.mutex());
  const ChangeSet* changes = shards_.features().changes.get();
  if (changes == nullptr) return {};
  return {.max_rows = changes->max_keys(),
          .num_rows = changes->size(),
          .is_due = changes->size() >= changes->max_keys() / 2,
          .has_overflowed = changes->has_overflowed()};
}

}  // namespace persia::store

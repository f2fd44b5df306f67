#include "checkpoint/loader.h"

#include <optional>
#include <string>
#include <utility>

namespace persia::checkpoint {
namespace {

// State of another optimizer has another length or meaning: read as this one's it would be noise.
Status CheckShape(const BlockShape& block, OptimizerKind kind, const store::RowShape& wanted) {
  if (block.optimizer == kind && block.state_floats == wanted.state_floats &&
      block.has_scalar == wanted.has_scalar) {
    return Status::Ok();
  }
  return InvalidArgument(
      "rows of dim ", block.dim, " have the state of another optimizer (kind ",
      static_cast<int>(block.optimizer), ", ", block.state_floats,
      " floats) than the train config's (kind ", static_cast<int>(kind), ", ", wanted.state_floats,
      " floats); give the train config that the checkpoint was made with, or begin with the state "
      "of "
      "new rows (with_state=False)");
}

// The config of rows that only answer lookups. Plain SGD has no state: training with the
// checkpoint's optimizer is refused, as its state is missing. Limits belong to the stores of the
// training servers; a store that answers keeps the rows that they have kept.
RowConfig WithoutTraining(RowConfig rows) {
  rows.optimizer = OptimizerConfig();
  rows.capacity = 0;
  rows.time_to_live_sec = 0;
  rows.min_norm = 0;
  return rows;
}

}  // namespace

StatusOr<std::unique_ptr<Loader>> Loader::Begin(store::EmbeddingStore& store,
                                                const Options& options) {
  PERSIA_RETURN_IF_ERROR(options.config.Validate());
  PERSIA_ASSIGN_OR_RETURN(auto rows, store::StoreLoad::Begin(store));
  Options completed = options;
  // A checkpoint without groups does not know the job's: the store keeps its own.
  if (const auto config = store.config(); config.has_value() && options.config.groups.empty()) {
    completed.config.groups = config->groups;
    completed.config.feature_index_prefix_bit = config->feature_index_prefix_bit;
  }
  std::unique_ptr<Loader> loader(new Loader(store, completed, std::move(rows)));
  // While all servers still have their rows: a refusal by Replace() may come when some have not.
  if (options.kind == FileKind::kRows) {
    PERSIA_RETURN_IF_ERROR(loader->rows_->Check(loader->store_config_));
  }
  return loader;
}

Loader::Loader(store::EmbeddingStore& store, const Options& options,
               std::unique_ptr<store::StoreLoad> rows)
    : store_(store),
      options_(options),
      store_config_(StoreConfig()),
      rules_(options.config),
      rows_(std::move(rows)) {}

// The groups keep their initializers and admission: a server that answers must know of no others.
TrainConfig Loader::StoreConfig() const {
  TrainConfig config = options_.config;
  if (options_.with_state) return config;
  static_cast<RowConfig&>(config) = WithoutTraining(config);
  for (GroupConfig& group : config.groups) group.rows = WithoutTraining(group.rows);
  return config;
}

// Policies are few: signs that follow one another in a block and have the same one are checked
// once.
Status Loader::Check(const BlockRows& rows) const {
  if (rows.shape.kind == BlockKind::kRemovals) {
    if (options_.kind != FileKind::kRows) return Status::Ok();
    return InvalidArgument("a block of removals is no part of a checkpoint; apply it as a change");
  }
  const bool has_none = rows.shape.state_floats == 0 && !rows.shape.has_scalar;
  if (options_.fresh_state || (!options_.with_state && has_none)) return Status::Ok();
  const store::RowPolicy* checked = nullptr;
  for (const uint64_t sign : rows.signs) {
    const store::RowPolicy& rules = rules_.Of(sign);
    if (&rules == checked) continue;
    checked = &rules;
    PERSIA_RETURN_IF_ERROR(CheckShape(rows.shape, options_.config.OfSign(sign).optimizer.kind,
                                      rules.ShapeFor(rows.shape.dim)));
  }
  return Status::Ok();
}

template <typename Visit>
Status Loader::ForEachBlock(std::span<const std::byte> chunk, Visit visit) const {
  BlockRows rows;
  for (BlockDecoder blocks(chunk); !blocks.AtEnd();) {
    PERSIA_RETURN_IF_ERROR(blocks.Next(&rows));
    PERSIA_RETURN_IF_ERROR(Check(rows));
    PERSIA_RETURN_IF_ERROR(visit(rows));
  }
  return Status::Ok();
}

// Decodes all and keeps nothing: a checkpoint is checked as a whole before the store's rows are
// removed.
StatusOr<uint64_t> Loader::Verify(std::span<const std::byte> chunk) {
  uint64_t num_rows = 0;
  PERSIA_RETURN_IF_ERROR(ForEachBlock(chunk, [&](const BlockRows& rows) {
    num_rows += rows.signs.size();
    if (!IsForeign(rows)) num_verified_ += rows.signs.size();
    return Status::Ok();
  }));
  return num_rows;
}

// Reserved before the first Add(), when threads begin to add rows in any order.
Status Loader::Replace() {
  PERSIA_RETURN_IF_ERROR(rows_->Replace(store_config_));
  rows_->Reserve(num_verified_);
  return Status::Ok();
}

// Against the store as it is now: another script may have configured it since Begin().
Status Loader::CheckStore(const BlockRows& rows, const std::optional<TrainConfig>& of_store) const {
  if (!of_store.has_value()) {
    return FailedPrecondition("rows were loaded before Configure; replace the rows first");
  }
  const uint32_t dim = rows.shape.dim;
  const RowConfig* checked = nullptr;
  for (const uint64_t sign : rows.signs) {
    const RowConfig& found = of_store->OfSign(sign);
    if (&found == checked) continue;
    checked = &found;
    const OptimizerConfig& optimizer = store_config_.OfSign(sign).optimizer;
    if (found.optimizer.kind != optimizer.kind ||
        found.optimizer.StateFloats(dim) != optimizer.StateFloats(dim)) {
      return FailedPrecondition(
          "the store is configured with another optimizer than the rows were trained with; "
          "replace its rows, or configure it with the checkpoint's");
    }
  }
  return Status::Ok();
}

// Rows and removals of a packet must come in one step, those of a checkpoint would not fit into
// memory.
Status Loader::CheckKind(bool is_of_changes) const {
  if (is_of_changes == (options_.kind != FileKind::kRows)) return Status::Ok();
  return FailedPrecondition(is_of_changes
                                ? "changes were applied by a loading of all rows; add them"
                                : "rows were added by a loading of changes; apply them");
}

// Each server loads whole files and keeps its own part: the number of servers may have changed.
bool Loader::IsForeign(const BlockRows& rows) const {
  const Replica& replica = options_.replica;
  return replica.placement.ServerOfShard(rows.shape.virtual_shard) != replica.index;
}

// Without state, StoreLoad gives each row the state of a new one.
store::LoadedRows Loader::RowsOf(const BlockRows& rows) const {
  return {.dim = rows.shape.dim,
          .signs = rows.signs,
          .ages = rows.ages,
          .embeddings = rows.embeddings(),
          .state = options_.with_state && !options_.fresh_state ? rows.state() : nullptr,
          .scalars = rows.shape.has_scalar ? rows.scalars.data() : nullptr};
}

// Runs in many threads; only what it decoded is added under the mutex. A list, so that the spans of
// `changes` stay valid when it is moved.
StatusOr<uint64_t> Loader::Prepare(std::span<const std::byte> chunk) {
  PERSIA_RETURN_IF_ERROR(CheckKind(/*is_of_changes=*/true));
  std::list<BlockRows> decoded;  // what `changes` point into
  store::Changes changes;
  const std::optional<TrainConfig> of_store = store_.config();
  uint64_t num_rows = 0, num_foreign = 0;
  const auto keep = [&](BlockRows& block) {
    if (IsForeign(block)) {
      num_foreign += block.signs.size();
      return Status::Ok();
    }
    const BlockRows& rows = decoded.emplace_back(std::move(block));
    num_rows += rows.signs.size();
    if (rows.shape.kind == BlockKind::kRemovals) {
      changes.removals.push_back(rows.signs);
      return Status::Ok();
    }
    PERSIA_RETURN_IF_ERROR(CheckStore(rows, of_store));
    changes.rows.push_back(RowsOf(rows));
    return Status::Ok();
  };
  PERSIA_RETURN_IF_ERROR(ForEachBlock(chunk, keep));
  const std::lock_guard lock(mutex_);
  prepared_.splice(prepared_.end(), decoded);
  changes_.removals.insert(changes_.removals.end(), changes.removals.begin(),
                           changes.removals.end());
  changes_.rows.insert(changes_.rows.end(), changes.rows.begin(), changes.rows.end());
  num_foreign_ += num_foreign;
  return num_rows;
}

// Taken out first: where the store refuses, they are not applied by a later call.
StatusOr<uint64_t> Loader::Apply() {
  PERSIA_RETURN_IF_ERROR(CheckKind(/*is_of_changes=*/true));
  const std::lock_guard lock(mutex_);
  const std::list<BlockRows> prepared = std::exchange(prepared_, {});
  store::Changes changes = std::exchange(changes_, {});
  changes.from_nothing = options_.kind == FileKind::kChangesFromNothing && !has_cleared_;
  PERSIA_RETURN_IF_ERROR(rows_->Apply(changes));
  has_cleared_ = true;
  uint64_t num_rows = 0;
  for (const BlockRows& rows : prepared) num_rows += rows.signs.size();
  num_rows_ += num_rows;
  return num_rows;
}

StatusOr<uint64_t> Loader::Add(std::span<const std::byte> chunk) {
  PERSIA_RETURN_IF_ERROR(CheckKind(/*is_of_changes=*/false));
  const std::optional<TrainConfig> of_store = store_.config();
  if (!of_store.has_value()) {
    return FailedPrecondition("rows were loaded before Configure; configure the store first");
  }
  uint64_t num_added = 0;
  const auto add = [&](const BlockRows& rows) {
    if (IsForeign(rows)) {
      num_foreign_ += rows.signs.size();
      return Status::Ok();
    }
    PERSIA_RETURN_IF_ERROR(CheckStore(rows, of_store));
    PERSIA_RETURN_IF_ERROR(rows_->Add(RowsOf(rows)));
    num_added += rows.signs.size();
    num_rows_ += rows.signs.size();
    return Status::Ok();
  };
  PERSIA_RETURN_IF_ERROR(ForEachBlock(chunk, add));
  return num_added;
}

}  // namespace persia::checkpoint

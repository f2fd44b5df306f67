#include "client/embedding_bags.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <ranges>
#include <string>
#include <utility>

#include "simd/kernels.h"

namespace persia::client {
namespace {

using store::InPlaceRows;
using store::LookupMode;
using store::LookupReport;
using store::MissingRow;
using store::UpdateReport;

// Of one slot of a batch; a group's slots together must stay below 2^32 too.
constexpr uint64_t kMaxSigns = uint64_t{1} << 28;

// Below this many IDs a batch takes less time than waking the other threads.
constexpr size_t kMinIdsForThreads = 4096;

// Before anything is planned: a NaN would reach every row of its sample.
Status CheckWeights(std::span<const float> weights, size_t num_values) {
  if (!weights.empty() && weights.size() != num_values) {
    return InvalidArgument("weights has ", weights.size(), " elements for ", num_values,
                           " values, must have one for each");
  }
  if (!simd::ActiveKernels().all_finite(weights.data(), weights.size())) {
    return InvalidArgument("a weight is NaN or infinite: drop its ID, or give it 0");
  }
  return Status::Ok();
}

// What a slot with one ID a sample has; told without a branch.
bool AreOnes(std::span<const int64_t> lengths) {
  int64_t others = 0;
  for (const int64_t length : lengths) others |= length ^ 1;
  return others == 0;
}

// Before anything of the batch is used: the addresses of rows are computed from the IDs.
Status CheckArrayIds(const worker::SlotConfig& slot, std::span<const uint64_t> ids) {
  if (slot.num_array_ids == 0) return Status::Ok();
  uint64_t num_beyond = 0;
  for (const uint64_t id : ids) num_beyond += static_cast<uint64_t>(id >= slot.num_array_ids);
  if (num_beyond == 0) return Status::Ok();
  const auto first =
      std::ranges::find_if(ids, [&](uint64_t id) { return id >= slot.num_array_ids; });
  return InvalidArgument("slot '", slot.name, "' has the ID ", *first,
                         ", and with index: array its IDs must be below its cardinality of ",
                         slot.num_array_ids, ": raise the cardinality, or leave index out");
}

// The feature groups of such slots.
std::vector<store::RowArraySpec> ArraysOf(const worker::SlotTable& slots) {
  std::vector<store::RowArraySpec> arrays;
  for (const worker::SlotConfig& slot : slots.slots()) {
    const auto is_same = [&](const auto& other) { return other.first_sign == slot.index_prefix; };
    if (slot.num_array_ids == 0 || std::ranges::any_of(arrays, is_same)) continue;
    arrays.push_back({slot.index_prefix, slot.num_array_ids, slot.dim});
  }
  return arrays;
}

// What is asked of a group, before and after it is planned.
bool IsSingle(const GroupBatch& group) { return group.IsSingle(); }
bool IsSingle(const SlotInputs& inputs) { return GroupBatch::IsSingle(inputs); }
size_t Column(const GroupBatch& group) { return group.column(); }
size_t Column(const SlotInputs& inputs) { return inputs[0].column; }
size_t Dim(const GroupBatch& group) { return group.rows().dim; }
size_t Dim(const SlotInputs& inputs) { return inputs[0].slot->dim; }

void PoolSingle(std::span<const GroupBatch> groups, const store::RowFormat& format, float* out,
                size_t stride) {
  thread_local std::vector<simd::ColumnSource> columns;
  columns.clear();
  for (const GroupBatch& group : groups) {
    columns.push_back({group.rows().values.data(), group.numbers().data(), group.rows().dim});
  }
  format.pooling().copy_columns(out + groups[0].column(), stride, columns.data(), columns.size(),
                                groups[0].numbers().size());
}

// Calls single(groups) for each run of single-valued groups side by side, other(group) for each
// other one.
template <typename Group, typename Single, typename Other>
void ForEachRun(std::span<const Group> groups, Single single, Other other) {
  size_t begin = 0;
  while (begin < groups.size()) {
    size_t end = begin;
    size_t column = Column(groups[begin]);
    // Columns that follow one another are one block of the matrix, which a kernel reads from front
    // to back.
    while (end < groups.size() && IsSingle(groups[end]) && Column(groups[end]) == column) {
      column += Dim(groups[end++]);
    }
    if (end == begin) {
      other(groups[begin++]);
    } else {
      single(groups.subspan(begin, end - begin));
      begin = end;
    }
  }
}

}  // namespace

// Greedy: a run takes pieces until the sum so far is as near to its share as it will be.
std::vector<WorkRun> DivideWork(std::span<const double> costs, size_t num_runs) {
  num_runs = std::min(num_runs, costs.size());
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  std::vector<WorkRun> runs;
  size_t end = 0;
  double passed = 0.0;  // the cost of the pieces before `end`
  for (size_t run = 1; run <= num_runs; ++run) {
    const size_t begin = end;
    const size_t last_end = costs.size() - (num_runs - run);  // leaves a piece for each later run
    const double share = total * static_cast<double>(run) / static_cast<double>(num_runs);
    do {
      passed += costs[end++];
    } while (end < last_end && (run == num_runs || passed + costs[end] / 2 <= share));
    runs.push_back({begin, end});
  }
  return runs;
}

EmbeddingBags::EmbeddingBags(const EmbeddingBagsOptions& options, worker::SlotTable slots,
                             std::unique_ptr<store::EmbeddingStore> store)
    : slots_(std::move(slots)),
      store_(std::move(store)),
      format_(options.store.row_dtype),
      threads_(options.num_threads) {
  uint32_t max_dim = 0;
  std::vector<uint32_t> numbers;  // of the config's groups, which need not be consecutive
  for (const worker::SlotConfig& slot : options.slots) {
    slots_by_position_.push_back(slots_.Find(slot.name));
    const auto known = std::find(numbers.begin(), numbers.end(), slot.group);
    group_of_.push_back(static_cast<uint32_t>(known - numbers.begin()));
    if (known == numbers.end()) numbers.push_back(slot.group);
    num_columns_ += slot.dim;
    max_dim = std::max(max_dim, slot.dim);
  }
  num_groups_ = numbers.size();
  zeros_.resize(max_dim, 0.0f);
  inputs_.resize(num_groups_);
  recent_.resize(num_groups_);
  // By number, until the first batch has shown what the groups cost.
  units_ = DivideWork(std::vector<double>(num_groups_, 1.0), NumUnits());
}

// Enough units for all threads; and where there are few threads, units of this many of a sample's
// columns: slots are read and written together, while the rows of all of them stay in the
// second-level cache or near it.
size_t EmbeddingBags::NumUnits() const {
  constexpr size_t kUnitFloats = 448;
  const size_t wanted = (num_columns_ + kUnitFloats - 1) / kUnitFloats;
  const size_t num_threads = threads_.num_threads();
  const size_t rounded = (wanted + num_threads - 1) / num_threads * num_threads;
  return std::min(rounded, num_groups_);
}

// Slots differ in how many of their IDs are distinct, and a thread that is through waits for the
// others: with 26 slots shared out by number one of two threads had an eighth more to do. Batches
// are alike, so the last one tells; results do not depend on it.
void EmbeddingBags::DivideGroups(const BagBatch& batch) {
  constexpr double kIdsARow = 5.0;      // to find and update a row costs as much as so many IDs
  constexpr double kFloatsAnId = 16.0;  // and what an ID costs at any dim, so many floats
  if (threads_.num_threads() == 1 || batch.num_ids < kMinIdsForThreads) return;
  thread_local std::vector<double> costs;
  costs.assign(num_groups_, 0.0);
  for (size_t g = 0; g < num_groups_; ++g) {
    for (const SlotInput& input : inputs_[g]) costs[g] += static_cast<double>(input.ids.size());
    const store::SignRows& rows = batch.groups[g].rows();
    costs[g] += kIdsARow * static_cast<double>(rows.signs.size());
    costs[g] *= kFloatsAnId + static_cast<double>(rows.dim);
  }
  units_ = DivideWork(costs, units_.size());
}

Status EmbeddingBags::Divide(std::span<const uint64_t> values, std::span<const int64_t> lengths,
                             std::span<const float> weights) {
  if (lengths.size() % num_slots() != 0) {
    return InvalidArgument("lengths has ", lengths.size(),
                           " elements, must have one for each of the ", num_slots(),
                           " slots and each sample");
  }
  if (values.size() > std::numeric_limits<uint32_t>::max()) {
    return InvalidArgument("values has ", values.size(), " IDs; make batches of fewer than 2^32");
  }
  PERSIA_RETURN_IF_ERROR(CheckWeights(weights, values.size()));
  const size_t batch_size = lengths.size() / num_slots();
  for (auto& inputs : inputs_) inputs.clear();
  std::span<const uint64_t> rest = values;
  for (uint32_t slot = 0; slot < num_slots(); ++slot) {
    PERSIA_RETURN_IF_ERROR(
        DivideSlot(slot, &rest, &weights, lengths.subspan(slot * batch_size, batch_size)));
  }
  if (rest.empty()) return Status::Ok();
  return InvalidArgument("values has ", values.size(), " IDs but lengths add up to ",
                         values.size() - rest.size());
}

Status EmbeddingBags::DivideSlot(uint32_t slot, std::span<const uint64_t>* values,
                                 std::span<const float>* weights,
                                 std::span<const int64_t> lengths) {
  const worker::SlotConfig& config = *slots_by_position_[slot];
  const bool are_ones = AreOnes(lengths);
  // Each length is bounded before it is added, so that the sum cannot wrap around.
  const auto limit = static_cast<uint64_t>(values->size());
  uint64_t count = are_ones ? lengths.size() : 0, worst = 0;
  if (!are_ones) {
    for (const int64_t length : lengths) {
      count += static_cast<uint64_t>(length);
      worst = std::max(worst, static_cast<uint64_t>(length));
    }
  }
  if (worst > limit || count > limit) {
    const auto bad = std::find_if(lengths.begin(), lengths.end(), [](int64_t n) { return n < 0; });
    const std::string where = "slot '" + config.name + "': ";
    if (bad != lengths.end()) {
      return InvalidArgument(where, "the length of sample ", bad - lengths.begin(), " is ", *bad,
                             ", must not be negative");
    }
    return InvalidArgument(where, "lengths add up to more IDs than the ", values->size(),
                           " of values that are left for it");
  }
  // Numbers of rows and of their places in the batch are 32 bits.
  if (count * config.num_buckets() > kMaxSigns) {
    return InvalidArgument("slot '", config.name, "': ", count, " IDs of ", config.num_buckets(),
                           " hash-stack rounds each are too many for one batch: make it smaller");
  }
  PERSIA_RETURN_IF_ERROR(CheckArrayIds(config, values->first(count)));
  std::vector<SlotInput>& inputs = inputs_[group_of_[slot]];
  size_t column = 0;
  for (uint32_t i = 0; i < slot; ++i) column += slots_by_position_[i]->dim;
  const size_t num_weights = weights->empty() ? 0 : count;
  inputs.push_back(
      {&config, values->first(count), lengths, are_ones, weights->first(num_weights), column});
  *values = values->subspan(count);
  *weights = weights->subspan(num_weights);
  return Status::Ok();
}

StatusOr<PooledBags> EmbeddingBags::Lookup(std::span<const uint64_t> values,
                                           std::span<const int64_t> lengths, LookupMode mode,
                                           std::span<const float> weights) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(Divide(values, lengths, weights));
  PERSIA_ASSIGN_OR_RETURN(InPlaceRows store, InPlaceRows::Begin(*store_, mode));
  PooledBags pooled;
  pooled.batch_size = static_cast<uint32_t>(lengths.size() / num_slots());
  pooled.rows = Buffer(size_t{pooled.batch_size} * num_columns_ * sizeof(float));
  auto* out = reinterpret_cast<float*>(pooled.rows.data());
  const bool uses_threads = values.size() >= kMinIdsForThreads;
  if (mode == LookupMode::kInference) {
    For(uses_threads, units_.size(), [&](size_t u) { PoolUnnumbered(store, units_[u], out); });
    return pooled;
  }
  const auto for_each_unit = [&](const auto& body) { For(uses_threads, units_.size(), body); };
  BagBatchPtr batch = BatchShelf::Take(shelf_);
  batch->batch_size = pooled.batch_size;
  batch->num_ids = values.size();
  batch->groups.resize(num_groups_);
  // A run that has all its rows is pooled at once, while its numbers are in the cache.
  std::vector<std::vector<WorkRun>> unpooled(units_.size());
  for_each_unit([&](size_t u) {
    const auto plan = [&](std::span<const SlotInputs> inputs) {
      const auto first = static_cast<size_t>(inputs.data() - inputs_.data());
      const WorkRun run = {first, first + inputs.size()};
      PlanRun(run, store, batch.get()) ? Pool(*batch, run, out) : unpooled[u].push_back(run);
    };
    ForEachRun(std::span<const SlotInputs>(inputs_).subspan(units_[u].begin,
                                                            units_[u].end - units_[u].begin),
               plan, [&](const SlotInputs& inputs) { plan({&inputs, 1}); });
  });
  PERSIA_RETURN_IF_ERROR(InsertMissing(batch.get(), &store));
  for_each_unit([&](size_t u) {
    for (const WorkRun run : unpooled[u]) Pool(*batch, run, out);
  });
  DivideGroups(*batch);
  batch->removals = store.Removals();
  pooled.batch = std::move(batch);
  return pooled;
}

bool EmbeddingBags::PlanRun(WorkRun run, const InPlaceRows& store, BagBatch* batch) const {
  thread_local worker::UniqueKeys keys;
  bool has_all = true;
  for (size_t i = run.begin; i < run.end; ++i) {
    GroupBatch& group = batch->groups[i];
    store::RowArray* const array = store.ArrayOf(inputs_[i][0].slot->index_prefix);
    group.Plan(inputs_[i], slots_, &keys, array);
    array != nullptr ? store.FindInArray(array, group.rows(), group.missing())
                     : store.Find(group.rows(), zeros_.data(), group.missing());
    has_all &= group.missing()->empty();
  }
  return has_all;
}

void EmbeddingBags::For(bool uses_threads, size_t count, const std::function<void(size_t)>& body) {
  if (uses_threads) return threads_.For(count, body);
  for (size_t i = 0; i < count; ++i) body(i);
}

std::span<const GroupBatch> EmbeddingBags::GroupsOf(const BagBatch& batch, Unit unit) {
  return std::span(batch.groups).subspan(unit.begin, unit.end - unit.begin);
}

void EmbeddingBags::Pool(const BagBatch& batch, Unit unit, float* out) const {
  ForEachRun(
      GroupsOf(batch, unit), [&](auto groups) { PoolSingle(groups, format_, out, num_columns_); },
      [&](const GroupBatch& group) { group.Pool(format_, out, num_columns_); });
}

void EmbeddingBags::PoolUnnumbered(const InPlaceRows& store, Unit unit, float* out) {
  const UnnumberedPooling pooling = {slots_,        store, store.NumRemovals(), format_,
                                     zeros_.data(), out,   num_columns_};
  const SlotInputs* const all = inputs_.data();
  const auto recent = [&](const SlotInputs& inputs) { return &recent_[&inputs - all]; };
  ForEachRun(
      std::span<const SlotInputs>(all + unit.begin, all + unit.end),
      [&](auto groups) { pooling.PoolSingle(groups, recent(groups[0])); },
      [&](const SlotInputs& inputs) {
        for (const SlotInput& input : inputs) pooling.Pool(input, recent(inputs));
      });
}

// In the order of the groups within each shard, so that slots do not depend on threads.
Status EmbeddingBags::InsertMissing(BagBatch* batch, InPlaceRows* rows) {
  // A shard is changed by one thread, so the missing rows of all groups are divided by shard.
  missing_.resize(rows->num_shards());
  for (auto& list : missing_) list.clear();
  size_t num_missing = 0;
  for (GroupBatch& group : batch->groups) {
    for (const uint32_t index : *group.missing()) {
      const MissingRow row = {&group.rows(), index};
      missing_[rows->ShardOf(row)].push_back(row);
      ++num_missing;
    }
  }
  if (num_missing == 0) return Status::Ok();
  std::vector<Status> statuses(missing_.size());
  std::vector<LookupReport> reports(missing_.size());
  For(num_missing >= kMinIdsForThreads, missing_.size(), [&](size_t shard) {
    statuses[shard] = rows->Insert(static_cast<uint32_t>(shard), missing_[shard], &reports[shard]);
  });
  for (const LookupReport& report : reports) rows->Count(report, {});
  for (const Status& status : statuses) PERSIA_RETURN_IF_ERROR(status);
  return Status::Ok();
}

StatusOr<UpdateReport> EmbeddingBags::Update(BagBatch& batch, std::span<const float> gradients) {
  const std::lock_guard lock(mutex_);
  if (gradients.size() != batch.batch_size * num_columns_) {
    return InvalidArgument("the gradient has ", gradients.size(), " elements, must have ",
                           batch.batch_size, " x ", num_columns_);
  }
  // The rows that the batch remembers may have been changed by its own update: a second one would
  // be a step of stale gradients.
  if (batch.is_updated) {
    return FailedPrecondition(
        "the rows of this batch have been updated already: add up the losses and call backward "
        "once");
  }
  InPlaceRows store = InPlaceRows::BeginUpdate(*store_, batch.removals);
  batch.is_updated = true;
  std::vector<UpdateReport> reports(units_.size());
  For(batch.num_ids >= kMinIdsForThreads, units_.size(), [&](size_t i) {
    const size_t u = units_.size() - 1 - i;
    std::vector<std::span<const GroupBatch>> runs;
    ForEachRun(
        GroupsOf(batch, units_[u]), [&](auto groups) { runs.push_back(groups); },
        [&](const GroupBatch& group) { runs.push_back({&group, 1}); });
    // Backwards, as the units: the rows that were pooled last are still in the cache.
    for (const auto groups : std::ranges::reverse_view(runs)) {
      UpdateGroups(groups, gradients.data(), num_columns_, &store, &reports[u]);
    }
  });
  UpdateReport total;
  for (const UpdateReport& report : reports) {
    total.num_updated += report.num_updated;
    total.num_missing += report.num_missing;
    total.num_nonfinite += report.num_nonfinite;
  }
  store.Count({}, total);
  return total;
}

Status EmbeddingBags::SetRows(uint32_t slot, std::span<const uint64_t> ids,
                              std::span<const float> rows) {
  const worker::SlotConfig& config = *slots_by_position_[slot];
  // An ID of such a slot is a sum of rows that other IDs share.
  if (config.hash_stack_rounds != 0) {
    return InvalidArgument("slot '", config.name,
                           "' has a hash stack: its IDs have no rows of their own to set");
  }
  if (rows.size() != ids.size() * config.dim) {
    return InvalidArgument("slot '", config.name, "': ", ids.size(), " IDs came with ", rows.size(),
                           " floats, must have ", config.dim, " each");
  }
  if (!simd::ActiveKernels().all_finite(rows.data(), rows.size())) {
    return InvalidArgument("slot '", config.name,
                           "': some values of the rows are NaN or infinite; set finite ones");
  }
  PERSIA_RETURN_IF_ERROR(CheckArrayIds(config, ids));
  std::vector<uint64_t> signs(ids.size());
  slots_.MakeSigns(config, ids, signs.data());
  const store::RowBlock block = {config.dim, signs};
  return store_->SetRows({&block, 1}, rows.data());
}

StatusOr<std::unique_ptr<EmbeddingBags>> EmbeddingBags::Create(EmbeddingBagsOptions options) {
  if (options.num_threads == 0) {
    return InvalidArgument("num_threads is 0; give at least 1");
  }
  for (const worker::SlotConfig& slot : options.slots) {
    if (slot.embedding_summation) continue;
    return InvalidArgument("slot '", slot.name,
                           "' is raw (embedding_summation: false); bags are pooled slots");
  }
  PERSIA_ASSIGN_OR_RETURN(
      auto slots, worker::SlotTable::Create(options.feature_index_prefix_bit, options.slots));
  options.store.arrays = ArraysOf(slots);
  PERSIA_ASSIGN_OR_RETURN(auto store, store::EmbeddingStore::Create(options.store));
  return std::unique_ptr<EmbeddingBags>(
      new EmbeddingBags(options, std::move(slots), std::move(store)));
}

Status EmbeddingBags::Configure(const TrainConfig& config, bool replace) {
  return store_->Configure(slots_.WithGroups(config), replace);
}

}  // namespace persia::client

#include "client/bag_batch.h"

#include <algorithm>
#include <array>

#include "simd/kernels.h"

namespace persia::client {
namespace {

using store::InPlaceRows;
using store::SignRows;
using store::UpdateReport;

constexpr size_t kUpdateBlock = 128;

// Sums of more floats (8 MiB) leave the caches before their rows are updated, which takes longer
// than to gather gradients; and a thread keeps their memory.
constexpr size_t kMaxSumFloats = size_t{1} << 21;

SignRows Block(const SignRows& rows, size_t begin, size_t count) {
  return {rows.dim, rows.signs.subspan(begin, count), rows.handles.subspan(begin, count),
          rows.values.subspan(begin, count)};
}

// Applies sum_of(number, place) to a group's rows, some tens at a time; `place` is its place among
// those. touch(number) brings what sum_of() reads into the cache.
template <typename TouchParts, typename SumOf>
void UpdateRows(const SignRows& rows, InPlaceRows* store, TouchParts touch, SumOf sum_of,
                UpdateReport* report) {
  std::array<const float*, kUpdateBlock> sums;
  for (size_t begin = 0; begin < rows.signs.size(); begin += kUpdateBlock) {
    const size_t count = std::min(kUpdateBlock, rows.signs.size() - begin);
    store->Locate(Block(rows, begin, count));
    for (size_t i = 0; i < count; ++i) touch(begin + i);
    for (size_t i = 0; i < count; ++i) sums[i] = sum_of(begin + i, i);
    store->Update(Block(rows, begin, count), std::span(sums).first(count), report);
  }
}

// The thread's, for the sums of gradients; it keeps what was in it.
std::span<float> SumMemory(size_t num_floats) {
  thread_local Reused<float> memory;
  return memory.Resize(num_floats);
}

// -0.0 leaves every number as it is when it is added.
std::span<float> EmptySums(size_t num_floats) {
  const std::span<float> sums = SumMemory(num_floats);
  std::ranges::fill(sums, -0.0f);
  return sums;
}

void UpdateFrom(const float* sums, const SignRows& rows, InPlaceRows* store, UpdateReport* report) {
  UpdateRows(
      rows, store, [](size_t) {},
      [=, dim = rows.dim](size_t number, size_t) { return sums + number * dim; }, report);
}

// Each row's gradients are gathered from wherever they lie and summed in registers.
void UpdateGathered(const GroupBatch& group, const float* gradients, size_t stride,
                    InPlaceRows* store, UpdateReport* report) {
  thread_local worker::GradientSums sums;
  const size_t dim = group.rows().dim;
  const std::span<float> memory = SumMemory(kUpdateBlock * dim);
  group.BuildSums(gradients, stride, &sums);
  UpdateRows(
      group.rows(), store,
      [&](size_t number) { sums.Prefetch(static_cast<uint32_t>(number), dim); },
      [&](size_t number, size_t place) {
        float* sum = memory.data() + place * dim;
        sums.Sum(static_cast<uint32_t>(number), dim, sum);
        return sum;
      },
      report);
}

// Without factors and where the sums of all rows are small, the gradients are read once, from front
// to back, and added to the sums of their rows: to order them by row takes longer.
void UpdateGroup(const GroupBatch& group, const float* gradients, size_t stride, InPlaceRows* store,
                 UpdateReport* report) {
  const size_t num_floats = group.rows().signs.size() * group.rows().dim;
  if (group.HasFactors() || num_floats > kMaxSumFloats) {
    return UpdateGathered(group, gradients, stride, store, report);
  }
  const std::span<float> sums = EmptySums(num_floats);
  group.AddGradients(gradients, stride, sums.data());
  UpdateFrom(sums.data(), group.rows(), store, report);
}

// Single-valued groups whose columns follow one another: the gradient is read once, from front to
// back, and added to the sums of all their rows. Wide rows gain most: one slot alone would touch
// another page of the gradient for every sample.
void UpdateSingle(std::span<const GroupBatch> groups, const float* gradients, size_t stride,
                  InPlaceRows* store, UpdateReport* report) {
  thread_local std::vector<simd::ColumnSums> columns;
  size_t num_floats = 0;
  for (const GroupBatch& group : groups) num_floats += group.rows().signs.size() * group.rows().dim;
  float* next = EmptySums(num_floats).data();
  columns.clear();
  for (const GroupBatch& group : groups) {
    columns.push_back({next, group.numbers().data(), group.rows().dim});
    next += group.rows().signs.size() * group.rows().dim;
  }
  simd::ActiveKernels().add_columns(gradients + groups[0].column(), stride, columns.data(),
                                    columns.size(), groups[0].numbers().size());
  for (size_t i = 0; i < groups.size(); ++i) {
    UpdateFrom(columns[i].sums, groups[i].rows(), store, report);
  }
}

}  // namespace

void GroupBatch::Plan(std::span<const SlotInput> inputs, const worker::SlotTable& slots,
                      worker::UniqueKeys* keys, store::RowArray* array) {
  num_slots_ = inputs.size();
  if (slots_.size() < num_slots_) slots_.resize(num_slots_);
  if (array == nullptr) {
    NumberSigns(inputs, slots, keys);
  } else {
    NumberIds(inputs, array);
  }
  const std::span<uint64_t> signs = signs_.span();
  rows_ = {inputs[0].slot->dim, signs, handles_.Resize(signs.size()), values_.Resize(signs.size())};
  missing_.clear();
}

void GroupBatch::NumberSigns(std::span<const SlotInput> inputs, const worker::SlotTable& slots,
                             worker::UniqueKeys* keys) {
  // One slot's signs are of use until they are numbered, so a thread has one array for all.
  thread_local Reused<uint64_t> slot_signs;
  keys->Clear(signs_.span().size());  // batches are alike, so the last one tells
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::span<uint32_t> numbers = PlanSlot(inputs[i], &slots_[i]);
    const std::span<uint64_t> signs = slot_signs.Resize(numbers.size());
    slots.MakeSigns(*inputs[i].slot, inputs[i].ids, signs.data());
    keys->Insert(signs, numbers.data());
  }
  const std::span<uint64_t> distinct = signs_.Resize(keys->keys().size());
  std::copy(keys->keys().begin(), keys->keys().end(), distinct.begin());
}

// The same numbers as by signs.
void GroupBatch::NumberIds(std::span<const SlotInput> inputs, store::RowArray* array) {
  thread_local store::ArrayNumbers ids;
  ids.Clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    ids.Insert(array, inputs[i].ids, PlanSlot(inputs[i], &slots_[i]).data());
  }
  const std::span<uint64_t> distinct = signs_.Resize(ids.ids().size());
  std::ranges::transform(ids.ids(), distinct.begin(),
                         [&](uint64_t id) { return array->spec().first_sign + id; });
}

std::span<uint32_t> GroupBatch::PlanSlot(const SlotInput& input, Slot* planned) {
  const worker::SlotConfig& slot = *input.slot;
  const std::span<uint32_t> numbers =
      planned->numbers.Resize(input.ids.size() * slot.num_buckets());
  planned->column = input.column;
  const std::span<float> weights = planned->weights.Resize(input.weights.size());
  std::copy(input.weights.begin(), input.weights.end(), weights.begin());
  planned->bags = {.dim = slot.dim,
                   .num_bags = static_cast<uint32_t>(input.lengths.size()),
                   .offsets = {},
                   .rows_per_offset = slot.num_buckets(),
                   .numbers = numbers,
                   .weights = planned->weights.span(),
                   .scaling = slot.scaling()};
  // Without offsets each bag has the rows of one ID.
  if (input.has_one_each) return numbers;
  const std::span<uint32_t> offsets = planned->offsets.Resize(input.lengths.size() + 1);
  uint32_t offset = 0;
  for (size_t i = 0; i < input.lengths.size(); ++i) {
    offsets[i] = offset;
    offset += static_cast<uint32_t>(input.lengths[i]);
  }
  offsets.back() = offset;
  planned->bags.offsets = offsets;
  return numbers;
}

bool GroupBatch::IsSingle(std::span<const SlotInput> inputs) {
  return inputs.size() == 1 && inputs[0].has_one_each && inputs[0].weights.empty() &&
         inputs[0].slot->num_buckets() == 1;
}

bool GroupBatch::IsSingle() const { return num_slots_ == 1 && slots_[0].bags.IsPlain(); }

void GroupBatch::Pool(const store::RowFormat& format, float* out, size_t stride) const {
  if (out == nullptr) return;  // a batch without samples
  for (const Slot& slot : planned()) {
    PoolBags(slot.bags, rows_.values.data(), out + slot.column, stride, format.pooling());
  }
}

bool GroupBatch::HasFactors() const {
  return std::ranges::any_of(planned(), [](const Slot& slot) {
    const worker::Bags& bags = slot.bags;  // a plain one's scaling is 1
    return !bags.weights.empty() || (bags.scaling != worker::Scaling::kNone && !bags.IsPlain());
  });
}

void GroupBatch::AddGradients(const float* gradients, size_t stride, float* sums) const {
  for (const Slot& slot : planned()) {
    const worker::Bags& bags = slot.bags;
    simd::ActiveKernels().add_bags(sums, gradients + slot.column, stride, bags.numbers.data(),
                                   bags.offsets.empty() ? nullptr : bags.offsets.data(),
                                   bags.rows_per_offset, bags.num_bags, bags.dim);
  }
}

// Gradients of the group's slots are in one matrix, each in its slot's columns.
void GroupBatch::BuildSums(const float* gradients, size_t stride,
                           worker::GradientSums* sums) const {
  thread_local std::vector<worker::Bags> bags;
  thread_local std::vector<worker::BagGradients> parts;
  bags.clear();
  parts.clear();
  for (const Slot& slot : planned()) {
    bags.push_back(slot.bags);
    parts.push_back({gradients + slot.column, stride});
  }
  sums->Build(bags, parts, 1.0f, static_cast<uint32_t>(rows_.signs.size()));
}

void UpdateGroups(std::span<const GroupBatch> groups, const float* gradients, size_t stride,
                  InPlaceRows* store, UpdateReport* report) {
  if (groups[0].IsSingle()) {
    UpdateSingle(groups, gradients, stride, store, report);
  } else {
    UpdateGroup(groups[0], gradients, stride, store, report);
  }
}

void UnnumberedPooling::Find(const worker::SlotConfig& slot, std::span<const uint64_t> ids,
                             std::span<const float*> values, store::RecentRows* recent) const {
  thread_local Reused<uint64_t> sign_memory;
  if (const store::RowArray* array = store.ArrayOf(slot.index_prefix); array != nullptr) {
    for (size_t i = 0; i < ids.size(); ++i) values[i] = array->values(ids[i]);
    return;
  }
  const std::span<uint64_t> signs = sign_memory.Resize(values.size());
  slots.MakeSigns(slot, ids, signs.data());
  store.FindForReading({slot.dim, signs, {}, values}, zeros, recent);
}

void UnnumberedPooling::PoolSingle(std::span<const SlotInputs> groups,
                                   store::RecentRows* recent) const {
  thread_local Reused<const float*> row_memory;
  thread_local std::vector<uint32_t> numbers;  // each sample reads its own row
  thread_local std::vector<simd::ColumnSource> columns;
  columns.clear();
  const size_t num_samples = groups[0][0].ids.size();
  while (numbers.size() < num_samples) numbers.push_back(static_cast<uint32_t>(numbers.size()));
  const std::span<const float*> all = row_memory.Resize(num_samples * groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const SlotInput& input = groups[g][0];
    const std::span<const float*> values = all.subspan(g * num_samples, num_samples);
    recent[g].Begin(num_samples, num_removals);
    Find(*input.slot, input.ids, values, &recent[g]);
    columns.push_back({values.data(), numbers.data(), input.slot->dim});
  }
  format.pooling().copy_columns(out + groups[0][0].column, stride, columns.data(), columns.size(),
                                num_samples);
}

void UnnumberedPooling::Pool(const SlotInput& input, store::RecentRows* recent) const {
  // So many signs and row pointers stay in the second-level cache. A bag with more is a block of
  // its own.
  constexpr size_t kBlockRows = 8192;
  thread_local Reused<const float*> row_memory;
  thread_local std::vector<uint32_t> offsets;
  const worker::SlotConfig& slot = *input.slot;
  const size_t block_ids = kBlockRows / slot.num_buckets();
  recent->Begin(input.ids.size() * slot.num_buckets(), num_removals);
  size_t id = 0;
  for (size_t bag = 0; bag < input.lengths.size();) {
    const size_t first_bag = bag, first_id = id;
    offsets.assign(1, 0);
    do {
      id += static_cast<size_t>(input.lengths[bag++]);
      offsets.push_back(static_cast<uint32_t>(id - first_id));
    } while (bag < input.lengths.size() && bag - first_bag < kBlockRows &&
             id - first_id + static_cast<size_t>(input.lengths[bag]) <= block_ids);
    const size_t num_ids = id - first_id;
    const std::span<const float*> values = row_memory.Resize(num_ids * slot.num_buckets());
    Find(slot, input.ids.subspan(first_id, num_ids), values, recent);
    const worker::Bags bags = {
        .dim = slot.dim,
        .num_bags = static_cast<uint32_t>(bag - first_bag),
        .offsets = offsets,
        .rows_per_offset = slot.num_buckets(),
        .weights = input.weights.empty() ? input.weights : input.weights.subspan(first_id, num_ids),
        .scaling = slot.scaling()};
    PoolBags(bags, values.data(), out + input.column + first_bag * stride, stride,
             format.pooling());
  }
}

}  // namespace persia::client

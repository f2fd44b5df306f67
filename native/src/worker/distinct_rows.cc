#include "worker/distinct_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "base/narrow_numbers.h"
#include "simd/kernels.h"
#include "worker/wire_floats.h"

namespace persia::worker {
namespace {

constexpr uint64_t kIndexHeadBytes = 16;
constexpr uint8_t kMaxNumberBytes = 4;

// A row number is below `num_rows`.
uint8_t NumberBytes(uint32_t num_rows) { return BytesFor(num_rows == 0 ? 0 : num_rows - 1); }

uint32_t MostIds(std::span<const uint32_t> offsets) {
  uint32_t most = 0;
  for (size_t i = 1; i < offsets.size(); ++i) most = std::max(most, offsets[i] - offsets[i - 1]);
  return most;
}

// Zeros up to the next multiple of 8 follow.
template <typename Value>
std::byte* Pack(uint8_t bytes, size_t count, Value value, std::byte* out) {
  PackNumbers(bytes, count, value, out);
  const uint64_t size_bytes = count * bytes;
  std::memset(out + size_bytes, 0, Padded(size_bytes) - size_bytes);
  return out + Padded(size_bytes);
}

// What precedes the arrays.
// All of it is the peer's word: CheckHead() and the reader hold each number against the bytes
// before memory is taken by it.
struct IndexHead {
  uint32_t num_ids = 0;
  uint8_t scaling = 0;
  uint8_t count_bytes = 0;
  uint8_t has_weights = 0;
  uint8_t reserved = 0;
  uint32_t rows_per_id = 0;
  uint32_t reserved2 = 0;
};
static_assert(sizeof(IndexHead) == kIndexHeadBytes);

Status CheckHead(const IndexHead& head, uint32_t batch_size) {
  if (head.scaling > static_cast<uint8_t>(Scaling::kMean)) {
    return Corruption("its scaling is " + std::to_string(head.scaling) + ", known are 0 to 2");
  }
  if (head.count_bytes > kMaxNumberBytes || head.has_weights > 1) {
    return Corruption("count_bytes is " + std::to_string(head.count_bytes) +
                      " and has_weights is " + std::to_string(head.has_weights) +
                      "; they must be 0 to 4, and 0 or 1");
  }
  if (head.rows_per_id == 0) return Corruption("an ID has no rows");
  if (head.count_bytes == 0 && head.num_ids != batch_size) {
    return Corruption("it has " + std::to_string(head.num_ids) + " IDs for " +
                      std::to_string(batch_size) + " samples of one ID each");
  }
  return Status::Ok();
}

// Turns counts into offsets, in place of one element more. The sum is kept in 64 bits, in which
// 65,535 counts cannot overflow.
Status ReadOffsets(ByteReader* reader, const IndexHead& head, DistinctSlot* slot) {
  const auto counts = ReadNumbers<uint32_t>(reader, head.count_bytes, slot->batch_size);
  if (!reader->ok()) return Status::Ok();
  slot->offsets.assign(1, 0);
  slot->offsets.reserve(counts.size() + 1);
  uint64_t sum = 0;
  for (const uint32_t count : counts) {
    sum += count;
    slot->offsets.push_back(static_cast<uint32_t>(sum));
  }
  if (sum == head.num_ids) return Status::Ok();
  return Corruption("its samples have " + std::to_string(sum) + " IDs, not " +
                    std::to_string(head.num_ids));
}

// The kernel for scales other than 1 has a place for each sum.
void AddPlain(const Bags& bags, const BagGradients& gradients, float scale, float* sums,
              uint32_t num_rows) {
  // Minus zero is what leaves every number as it is when it is added.
  std::fill_n(sums, size_t{num_rows} * bags.dim, -0.0f);
  if (scale == 1.0f) {
    simd::ActiveKernels().add_bags(sums, gradients.begin, gradients.stride, bags.numbers.data(),
                                   nullptr, 1, bags.num_bags, bags.dim);
    return;
  }
  thread_local std::vector<float*> begins;
  begins.resize(num_rows);
  for (size_t n = 0; n < begins.size(); ++n) begins[n] = sums + n * bags.dim;
  AddInPlace(bags, gradients, scale, begins);
}

}  // namespace

// A slot alone in its group has all of the group's signs. Both ways have as many floats, and the
// index is sent once.
bool IsSentAsRows(const LookupPlan& plan, const PlannedFeature& feature, EmbeddingsForm form,
                  bool requires_grad, RowsLayout* layout) {
  const PlannedGroup& group = plan.groups[feature.group];
  if (!feature.slot->embedding_summation || group.num_features != 1) return false;
  const bool wherever_possible = form == EmbeddingsForm::kRows;
  if (wherever_possible ? !feature.weights.empty() : form != EmbeddingsForm::kFewestBytes) {
    return false;  // no device sums with weights: it would round otherwise than the kernels here
  }
  const uint64_t num_ways = requires_grad ? 2 : 1;
  const uint64_t row_bytes = num_ways * group.dim * sizeof(float);
  const uint64_t pooled_bytes = row_bytes * plan.batch_size;
  const uint64_t distinct_bytes = row_bytes * group.num_signs;
  const uint64_t num_numbers = feature.sign_numbers.size();
  layout->number_bytes = NumberBytes(group.num_signs);
  // Before the samples are looked at: most slots with many IDs end here.
  if (!wherever_possible && distinct_bytes + num_numbers * layout->number_bytes >= pooled_bytes) {
    return false;
  }
  layout->count_bytes = feature.has_one_id_each ? 0 : BytesFor(MostIds(feature.offsets));
  layout->index_bytes = kIndexHeadBytes + Padded(layout->count_bytes * uint64_t{plan.batch_size}) +
                        Padded(layout->number_bytes * num_numbers) +
                        Padded(feature.weights.size() * sizeof(float));
  return wherever_possible || distinct_bytes + layout->index_bytes < pooled_bytes;
}

void PutRowsIndex(const PlannedFeature& feature, uint32_t first_number, const RowsLayout& layout,
                  std::byte* out) {
  const IndexHead head{.num_ids = feature.num_items(),
                       .scaling = static_cast<uint8_t>(feature.slot->scaling()),
                       .count_bytes = layout.count_bytes,
                       .has_weights = static_cast<uint8_t>(feature.weights.empty() ? 0 : 1),
                       .reserved = 0,
                       .rows_per_id = feature.slot->num_buckets(),
                       .reserved2 = 0};
  std::memcpy(out, &head, sizeof(head));
  out += sizeof(head);
  if (layout.count_bytes != 0) {
    const uint32_t* offsets = feature.offsets.data();
    out = Pack(
        layout.count_bytes, feature.offsets.size() - 1,
        [=](size_t i) { return offsets[i + 1] - offsets[i]; }, out);
  }
  const uint32_t* numbers = feature.sign_numbers.data();
  out = Pack(
      layout.number_bytes, feature.sign_numbers.size(),
      [=](size_t i) { return numbers[i] - first_number; }, out);
  const uint64_t size_bytes = feature.weights.size() * sizeof(float);
  if (size_bytes != 0) std::memcpy(out, feature.weights.data(), size_bytes);
  std::memset(out + size_bytes, 0, Padded(size_bytes) - size_bytes);
}

Bags DistinctSlot::bags() const {
  return {.dim = dim,
          .num_bags = batch_size,
          .offsets = offsets,
          .rows_per_offset = rows_per_id,
          .numbers = numbers,
          .weights = weights,
          .scaling = scaling};
}

size_t DistinctSlot::size_bytes() const {
  return sizeof(*this) + (offsets.size() + numbers.size()) * sizeof(uint32_t) +
         weights.size() * sizeof(float);
}

// Ok with a reader that failed means that the message is cut short, which the caller words for all
// slots alike.
Status ReadRowsIndex(ByteReader* reader, DistinctSlot* slot) {
  const auto head = reader->Get<IndexHead>();
  if (!reader->ok()) return Status::Ok();
  PERSIA_RETURN_IF_ERROR(CheckHead(head, slot->batch_size));
  slot->scaling = static_cast<Scaling>(head.scaling);
  slot->rows_per_id = head.rows_per_id;
  if (head.count_bytes != 0) PERSIA_RETURN_IF_ERROR(ReadOffsets(reader, head, slot));
  slot->numbers = ReadNumbers<uint32_t>(reader, NumberBytes(slot->num_rows),
                                        uint64_t{head.num_ids} * head.rows_per_id);
  const auto weights = reader->GetArray<float>(head.has_weights == 1 ? head.num_ids : 0);
  if (!reader->ok()) return Status::Ok();
  slot->weights.assign(weights.begin(), weights.end());
  uint32_t greatest = 0;
  for (const uint32_t number : slot->numbers) greatest = std::max(greatest, number);
  if (!slot->numbers.empty() && greatest >= slot->num_rows) {
    return Corruption("a row number is " + std::to_string(greatest) + " of " +
                      std::to_string(slot->num_rows) + " rows");
  }
  if (!simd::ActiveKernels().all_finite(weights.data(), weights.size())) {
    return Corruption("a weight is NaN or infinite");
  }
  return Status::Ok();
}

// By the kernels of the worker, in their order: whether a slot is pooled here or there, its bits
// are the same (ADR 39).
void PoolDistinct(const DistinctSlot& slot, const float* rows, float* out) {
  thread_local std::vector<const float*> begins;
  begins.resize(slot.num_rows);
  for (size_t n = 0; n < begins.size(); ++n) begins[n] = rows + n * slot.dim;
  PoolBags(slot.bags(), begins.data(), out, slot.dim);
}

// As Summation of reduction.cc does it for a group of one slot.
bool SumByRow(const DistinctSlot& slot, const float* gradients, float inverse_scale, float* sums,
              float* max_magnitude) {
  *max_magnitude = MaxMagnitude({gradients, size_t{slot.batch_size} * slot.dim});
  if (!std::isfinite(*max_magnitude)) return false;
  const Bags bags = slot.bags();
  const BagGradients bag_gradients{gradients, slot.dim};
  const size_t num_floats = size_t{slot.num_rows} * slot.dim;
  if (bags.IsPlain()) {
    AddPlain(bags, bag_gradients, inverse_scale, sums, slot.num_rows);
  } else {
    thread_local GradientSums gathered;
    gathered.Build({&bags, 1}, {&bag_gradients, 1}, inverse_scale, slot.num_rows);
    constexpr uint32_t kAhead = 8;
    for (uint32_t n = 0; n < slot.num_rows; ++n) {
      if (n + kAhead < slot.num_rows) gathered.Prefetch(n + kAhead, slot.dim);
      gathered.Sum(n, slot.dim, sums + size_t{n} * slot.dim);
    }
  }
  return simd::ActiveKernels().all_finite(sums, num_floats);
}

}  // namespace persia::worker

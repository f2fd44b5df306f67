#include "worker/pooling.h"

#include <algorithm>

#include "worker/row_kernels.h"

namespace persia::worker {
namespace {

constexpr size_t kPrefetchAhead = 8;

// `all` is what follows in the slot; its first `count`
// signs are summed, those behind them prefetched.
void SumRows(std::span<const uint32_t> all, size_t count, const SlotConfig& slot,
             std::span<const float* const> rows, const RowKernels& kernels, float* sum) {
  std::fill_n(sum, slot.dim, 0.0f);
  for (size_t i = 0; i < count; ++i) {
    if (i + kPrefetchAhead < all.size()) __builtin_prefetch(rows[all[i + kPrefetchAhead]]);
    kernels.Add(rows[all[i]], slot.dim, sum);
  }
  const float factor = SumFactor(slot, static_cast<uint32_t>(count));
  if (factor != 1.0f) kernels.Scale(factor, slot.dim, sum);
}

void PoolSamples(const PlannedFeature& feature, std::span<const float* const> rows, float* out) {
  const SlotConfig& slot = *feature.slot;
  const RowKernels kernels;
  const size_t num_buckets = slot.num_buckets();
  const std::span<const uint32_t> numbers = feature.sign_numbers;
  for (size_t sample = 0; sample + 1 < feature.offsets.size(); ++sample) {
    const size_t begin = feature.offsets[sample] * num_buckets;
    const size_t end = feature.offsets[sample + 1] * num_buckets;
    SumRows(numbers.subspan(begin), end - begin, slot, rows, kernels, out + sample * slot.dim);
  }
}

void PoolDistinct(const PlannedFeature& feature, std::span<const float* const> rows, float* out) {
  const SlotConfig& slot = *feature.slot;
  const RowKernels kernels;
  const size_t num_buckets = slot.num_buckets();
  const std::span<const uint32_t> numbers = feature.sign_numbers;
  std::fill_n(out, slot.dim, 0.0f);  // padding
  for (size_t item = 0; item < feature.num_items(); ++item) {
    SumRows(numbers.subspan(item * num_buckets), num_buckets, slot, rows, kernels,
            out + (item + 1) * slot.dim);
  }
}

}  // namespace

void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space) {
  if (feature.slot->embedding_summation) {
    PoolSamples(feature, rows, space.rows);
    return;
  }
  std::copy(feature.index.begin(), feature.index.end(), space.index);
  for (uint32_t sample = 0; sample < batch_size; ++sample) {
    space.sample_num_ids[sample] = feature.offsets[sample + 1] - feature.offsets[sample];
  }
  PoolDistinct(feature, rows, space.rows);
}

}  // namespace persia::worker

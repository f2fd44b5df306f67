#include "worker/pooling.h"

#include <algorithm>

namespace persia::worker {

Bags BagsOf(const PlannedFeature& feature) {
  const SlotConfig& slot = *feature.slot;
  Bags bags{.dim = slot.dim,
            .num_bags = feature.num_items(),
            .offsets = {},
            .rows_per_offset = slot.num_buckets(),
            .numbers = feature.sign_numbers,
            .weights = feature.weights,
            .scaling = slot.scaling()};
  if (slot.embedding_summation) {
    bags.num_bags = feature.num_rows();
    if (!feature.has_one_id_each) bags.offsets = feature.offsets;
  }
  return bags;
}

void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space) {
  const SlotConfig& slot = *feature.slot;
  const Bags bags = BagsOf(feature);
  if (slot.embedding_summation) {
    PoolBags(bags, rows.data(), space.rows, slot.dim);
    return;
  }
  std::copy(feature.index.begin(), feature.index.end(), space.index);
  for (uint32_t sample = 0; sample < batch_size; ++sample) {
    space.sample_num_ids[sample] = feature.offsets[sample + 1] - feature.offsets[sample];
  }
  std::fill_n(space.rows, slot.dim, 0.0f);  // padding
  PoolBags(bags, rows.data(), space.rows + slot.dim, slot.dim);
}

}  // namespace persia::worker

// Pooling: from the rows of signs to the embeddings of a slot.
//
// Sums run over a sample's IDs in their order, duplicates included, each ID's hash-stack buckets in
// the order of the rounds, so that the result does not depend on where rows lie.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "worker/batch_plan.h"
#include "worker/embeddings_writer.h"

namespace persia::worker {

// `rows[n]` is the row of sign number n. Fills all arrays of `space`.
void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space);

// What the sum of `num_signs` rows, and its gradient, are multiplied by.
inline float SumFactor(const SlotConfig& slot, uint32_t num_signs) {
  if (!slot.sqrt_scaling || num_signs <= 1) return 1.0f;
  return 1.0f / std::sqrt(static_cast<float>(num_signs));
}

}  // namespace persia::worker

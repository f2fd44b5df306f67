// Pooling: from the rows of signs to the embeddings of a slot.
//
// Sums run over a sample's IDs in their order, duplicates included, each ID's hash-stack buckets in
// the order of the rounds: see bags.h.
#pragma once

#include <cstdint>
#include <span>

#include "worker/bags.h"
#include "worker/batch_plan.h"
#include "worker/embeddings_writer.h"

namespace persia::worker {

// `rows[n]` is the row of sign number n. Fills all arrays of `space`.
void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space);

// The feature's bags: its samples, or its items. A raw slot's padding row is not among them.
Bags BagsOf(const PlannedFeature& feature);

}  // namespace persia::worker

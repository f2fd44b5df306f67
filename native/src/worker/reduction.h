// Reduction: from the gradients of a batch's slots to one gradient per sign.
//
// The mirror image of pooling. Sums run over the slots in the batch's order and over the samples in
// theirs, whatever the order in which slots were sent, so that equal gradients give equal sums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "worker/lookup_plan.h"
#include "worker/types.h"

namespace persia::worker {

struct ReducedGradients {
  // By server: what to update. Signs of which every slot was skipped are left out. Where none was,
  // these are the requests of the plan, which must stay; else those in `kept`.
  std::span<const ServerBlocks> requests;
  std::vector<ServerBlocks> kept;
  // By server: the sums, in the order of the request's signs, in `storage`.
  std::vector<std::span<float>> gradients;
  std::vector<Buffer> storage;
  std::vector<uint32_t> nonfinite_features;  // into LookupPlan::features, one a slot
  std::vector<uint32_t> skipped_features;
};

// Whether gradients may be divided by it: finite, positive, and so is its inverse.
bool IsGradientScale(float scale);

// Slots whose gradients the rank has summed (SlotGradient::summed) are passed on as they are.
// kInvalidArgument, naming the slot: unknown to the batch, twice, a wrong shape; or a scale that is
// not a finite positive number. A slot that is skipped, absent or not finite contributes nothing;
// where a sum would not be finite, neither does any slot that could have made it so.
StatusOr<ReducedGradients> ReduceGradients(const LookupPlan& plan, float scale,
                                           std::span<const SlotGradient> gradients);

}  // namespace persia::worker

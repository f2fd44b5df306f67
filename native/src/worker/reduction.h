// Reduction: from the gradients of a batch's slots to one gradient per sign.
//
// The mirror image of pooling. Sums run over the slots in the batch's order and over the samples in
// theirs, whatever the order in which slots were sent, so that equal gradients give equal sums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "worker/batch_plan.h"
#include "worker/embedding_worker.h"

namespace persia::worker {

struct ReducedGradients {
  // By server: what to update. Signs of which every slot was skipped are left out.
  std::vector<ServerBlocks> requests;
  std::vector<std::vector<float>> gradients;
  uint32_t num_nonfinite_slots = 0;
  uint32_t num_skipped_slots = 0;
};

// kInvalidArgument, naming the slot: unknown to the batch, twice, a wrong shape; or a scale that is
// not a finite positive number. A slot that is skipped, absent or not finite contributes nothing.
StatusOr<ReducedGradients> ReduceGradients(const BatchPlan& plan, float scale,
                                           std::span<const SlotGradient> gradients);

}  // namespace persia::worker

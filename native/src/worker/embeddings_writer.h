// EmbeddingsWriter: lays out an embeddings message (docs/wire_format.md), so that embeddings are
// pooled straight into the bytes that are sent. NarrowEmbeddings() converts one to 16 bits a float.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "worker/batch_plan.h"
#include "worker/wire_floats.h"

namespace persia::worker {

// Where one slot's arrays go: nowhere for a slot of a stage that is not asked for. Everything else
// of the message is written already.
struct SlotSpace {
  int64_t* index = nullptr;            // raw: [batch_size x sample_fixed_size]
  uint32_t* sample_num_ids = nullptr;  // raw: [batch_size]
  float* rows = nullptr;               // [num_rows x dim]
};

class EmbeddingsWriter {
 public:
  // kInvalidArgument: the message would be larger than any receiver takes.
  static StatusOr<EmbeddingsWriter> Create(const BatchPlan& plan, uint64_t worker_incarnation,
                                           uint64_t reference, StageMask stages = kAllStages);

  // In the order of the plan's features; the arrays are uninitialised.
  std::span<const SlotSpace> slots() const { return slots_; }
  Buffer Release() { return std::move(message_); }

 private:
  Buffer message_;
  std::vector<SlotSpace> slots_;
};

// The message with 16 bits a float, in memory of its own. `message` is one of float32, as
// EmbeddingsWriter makes it; kInternal when it is not. The worker pools in float32 and knows
// nothing of this; its service narrows what it sends.
StatusOr<Buffer> NarrowEmbeddings(std::span<const std::byte> message, WireDtype dtype);

}  // namespace persia::worker

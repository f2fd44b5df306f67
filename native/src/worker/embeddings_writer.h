// EmbeddingsWriter: lays out an embeddings message (docs/wire_format.md), so that embeddings are
// pooled straight into the bytes that are sent.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "worker/batch_plan.h"

namespace persia::worker {

// Where one slot's arrays go: nowhere for a slot of a part that is not asked for. Everything else
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
                                           uint64_t reference, LookupParts parts = kAllParts);

  // In the order of the plan's features; the arrays are uninitialised.
  std::span<const SlotSpace> slots() const { return slots_; }
  Buffer Release() { return std::move(message_); }

 private:
  Buffer message_;
  std::vector<SlotSpace> slots_;
};

}  // namespace persia::worker

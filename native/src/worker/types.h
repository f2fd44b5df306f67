// Plain data types of the embedding worker, for its engine, its service and its clients.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/row_protocol.h"
#include "worker/slot_config.h"

namespace persia::worker {

// The clock of net/types.h, which this header does not need to know.
using Deadline = std::chrono::steady_clock::time_point;

// The gradient of one slot's embeddings, in the caller's memory.
// Borrowed: the name and the rows must stay until the call that they are passed to has returned.
// Gradients of a raw slot include row 0, the padding, which is ignored.
struct SlotGradient {
  std::string_view slot;
  // The loss did not reach the slot: there are no rows, and it is counted.
  bool skipped = false;
  // As many as the slot's embeddings had; compared with the batch by the embedding worker.
  uint32_t num_rows = 0;
  uint32_t dim = 0;
  // [num_rows, dim], without gaps. Null where the slot is skipped.
  const float* rows = nullptr;
  // The rows are one sum for each distinct row of the slot, already divided by the scale: see
  // SumByRow().
  bool summed = false;
  // Where summed, the greatest magnitude of the gradients that were added up.
  float max_magnitude = 0.0f;
};

// What the answer to a lookup has for a pooled slot.
enum class EmbeddingsForm : uint32_t {
  kPooled = 0,  // one embedding a sample
  // The slot's distinct rows and which of them each ID needs, where both are fewer bytes.
  kFewestBytes = 1,
  // The same wherever the slot may be sent so, for a rank that pools on a device. Not on the wire.
  kRows = 2,
};

// The measured staleness of the rows that one lookup of a batch found, in updates.
// Slots that wait for earlier updates are looked up later than the others, so a batch may have
// several.
struct LookupStaleness {
  SlotMask slots = 0;  // all bits set for all
  uint32_t reserved = 0;
  uint64_t staleness = 0;
};
static_assert(sizeof(LookupStaleness) == 16);  // as on the wire

// What became of a batch's gradients.
// A repeated return gets the report of the first, to the last number.
struct ReturnReport {
  UpdateResult update;  // the servers' sums, and the greatest staleness
  // Slots left out because a gradient was NaN or infinite, or would have made a sum so.
  uint32_t num_nonfinite_slots = 0;
  // Slots for which no gradient was sent.
  uint32_t num_skipped_slots = 0;
  std::vector<LookupStaleness> lookups = {};  // the earliest first; no slot is in two

  Segments Encode() &&;
  static StatusOr<ReturnReport> Decode(std::span<const std::byte> body);
};

}  // namespace persia::worker

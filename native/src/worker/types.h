// Plain data types of the embedding worker, for its engine, its service and its clients.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/row_protocol.h"
#include "worker/slot_config.h"

namespace persia::worker {

using Deadline = std::chrono::steady_clock::time_point;

// The gradient of one slot's embeddings, in the caller's memory.
struct SlotGradient {
  std::string_view slot;
  bool skipped = false;
  uint32_t num_rows = 0;
  uint32_t dim = 0;
  const float* rows = nullptr;
};

// The measured staleness of the rows that one lookup of a batch found, in updates.
struct LookupStaleness {
  SlotMask slots = 0;  // all bits set for all
  uint32_t reserved = 0;
  uint64_t staleness = 0;
};
static_assert(sizeof(LookupStaleness) == 16);  // as on the wire

// What became of a batch's gradients.
struct ReturnReport {
  UpdateResult update;  // the servers' sums, and the greatest staleness
  uint32_t num_nonfinite_slots = 0;
  uint32_t num_skipped_slots = 0;
  std::vector<LookupStaleness> lookups = {};  // the earliest first; no slot is in two

  Segments Encode() &&;
  static StatusOr<ReturnReport> Decode(std::span<const std::byte> body);
};

}  // namespace persia::worker

// A lookup's embeddings as one piece of memory, for one copy to a device
// (docs/adr/0049-a-batch-crosses-to-the-device-once.md).
//
// Slots that are there as distinct rows are joined into blocks, so that a device pools all slots of
// a block with one operation. Other slots are copied as they are.
// Two steps, so that the caller allocates in between: the thread that looks up asks for the layout,
// takes pinned memory of that size, has it filled without the GIL, and starts one copy. Layout and
// filling are pure functions of the result, hence thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "worker/embeddings_message.h"

namespace persia::worker {

// Where no array is.
inline constexpr uint64_t kNoPlace = UINT64_MAX;

// Slots of one dim whose bags are all plain, or all not. Places are bytes from the pack's begin.
struct PackedBlock {
  uint32_t dim = 0;
  std::vector<uint32_t> slots = {};       // into LookupResult::slots
  std::vector<uint32_t> first_rows = {};  // by slot, and the end: its rows within the block's
  uint64_t num_numbers = 0;
  uint64_t rows = kNoPlace;     // float32 [first_rows.back(), dim]
  uint64_t numbers = kNoPlace;  // int32 [num_numbers]: the rows that the bags are the sums of
  // int32 [slots x batch_size + 1]: where each bag's numbers begin. kNoPlace: each has one.
  uint64_t offsets = kNoPlace;
  // float32 [slots x batch_size]: what the bags' sums are multiplied by. kNoPlace: all 1.
  uint64_t factors = kNoPlace;
};

// A pooled or raw slot.
struct PackedSlot {
  uint32_t position = 0;      // into LookupResult::slots
  uint64_t rows = kNoPlace;   // float32 [num_rows, dim]
  uint64_t index = kNoPlace;  // raw: int32 [batch_size, sample_fixed_size]
};

struct PackLayout {
  uint32_t batch_size = 0;
  std::vector<PackedBlock> blocks = {};
  std::vector<PackedSlot> slots = {};  // none that is absent
  uint64_t size_bytes = 0;
};

PackLayout LayOutPack(const LookupResult& result);

// `layout` must be that of `result`. Every array begins at a multiple of 64 bytes, for vector
// loads, if `out` does. Fills `layout.size_bytes` bytes at `out`, but for gaps between the arrays.
void FillPack(const LookupResult& result, const PackLayout& layout, std::byte* out);

}  // namespace persia::worker

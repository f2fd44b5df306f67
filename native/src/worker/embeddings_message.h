// The embeddings message (docs/wire_format.md), both ends of it.
//
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "worker/batch_plan.h"
#include "worker/wire_floats.h"

namespace persia::worker {

// Where one slot's arrays go: nowhere for a slot that is not asked for. Everything else
// of the message is written already.
struct SlotSpace {
  int64_t* index = nullptr;            // raw: [batch_size x sample_fixed_size]
  uint32_t* sample_num_ids = nullptr;  // raw: [batch_size]
  float* rows = nullptr;               // [num_rows x dim]
};

struct EmbeddingsLayout {
  Buffer message;
  std::vector<SlotSpace> slots;  // in the order of the plan's features; into `message`
};

// kInvalidArgument: the message would be larger than any receiver takes.
StatusOr<EmbeddingsLayout> LayOutEmbeddings(const BatchPlan& plan, uint64_t worker_incarnation,
                                            uint64_t reference, SlotMask slots = kAllSlots);

// The message with 16 bits a float, in memory of its own. `message` is one of float32, as
// nothing of this; its service narrows what it sends.
StatusOr<Buffer> NarrowEmbeddings(Buffer message, WireDtype dtype);

// Fills all arrays of `space`; `rows[n]` is the row of sign number n. Sums run over a sample's IDs
// in their order, duplicates included, each ID's hash-stack buckets in the order of the rounds: see
// bags.h.
void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space);

// A batch, and which embedding worker holds it.
struct BatchReference : BatchKey {
  uint32_t worker_index = 0;
};

// One slot's embeddings, in place inside the memory of the LookupResult.
struct SlotEmbedding {
  std::string name;
  bool raw = false;
  bool absent = false;  // not asked for: no rows
  uint32_t dim = 0;
  uint32_t num_rows = 0;
  uint32_t sample_fixed_size = 0;
  const float* rows = nullptr;               // [num_rows, dim]
  const int64_t* index = nullptr;            // raw: [batch_size, sample_fixed_size]
  const uint32_t* sample_num_ids = nullptr;  // raw: [batch_size]
};

struct LookupResult {
  BatchReference reference;  // reference.reference == 0: no gradient is expected
  uint32_t batch_size = 0;
  std::vector<SlotEmbedding> slots;
  Buffer storage;
  std::vector<Buffer> widened;  // rows that came with 16 bits
};

// Decodes the message in place; kCorruption names what is wrong. Sizes, indices and dims are
// checked (an index never points past the rows), for model code uses what comes out without another
// look.
StatusOr<LookupResult> DecodeEmbeddings(uint32_t worker_index, Buffer message);

}  // namespace persia::worker

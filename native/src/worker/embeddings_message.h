// The embeddings message (docs/wire_format.md), both ends of it.
//
// The embedding worker: LayOutEmbeddings() lays the message out, so that PoolFeature() pools
// straight into the bytes that are sent, and NarrowEmbeddings() converts one to 16 bits a float.
// The client: DecodeEmbeddings() checks a message and shows the embeddings in place. It pools those
// slots that were sent as distinct rows.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "worker/distinct_rows.h"
#include "worker/lookup_plan.h"
#include "worker/types.h"
#include "worker/wire_floats.h"

namespace persia::worker {

// Where one slot's arrays go: nowhere for a slot that is not asked for. Everything else
// of the message is written already.
// Pointers into the message of the layout, valid as long as it.
struct SlotSpace {
  int64_t* index = nullptr;            // raw: [batch_size x sample_fixed_size]
  uint32_t* sample_num_ids = nullptr;  // raw: [batch_size]
  float* rows = nullptr;               // [num_rows x dim]
  // The rows are the slot's distinct ones, whose sign numbers begin here; `num_distinct` is 0 where
  // they are pooled or raw.
  uint32_t first_number = 0;
  uint32_t num_distinct = 0;
  bool as_rows = false;
};

// A message whose heads are written and whose arrays are not.
struct EmbeddingsLayout {
  Buffer message;
  std::vector<SlotSpace> slots;  // in the order of the plan's features; into `message`
  // Bytes that a message of pooled embeddings would have beyond this one.
  uint64_t bytes_saved = 0;
};

// kInvalidArgument: the message would be larger than any receiver takes, were all slots pooled.
// A reference other than 0 means that gradients will be returned.
StatusOr<EmbeddingsLayout> LayOutEmbeddings(const LookupPlan& plan, uint64_t worker_incarnation,
                                            uint64_t reference, SlotMask slots = kAllSlots,
                                            EmbeddingsForm form = EmbeddingsForm::kPooled);

// The message with 16 bits a float, in memory of its own. `message` is one of float32 without
// slots as rows, as LayOutEmbeddings() makes it; kInternal when it is not. The worker pools in
// float32 and knows nothing of this; its service narrows what it sends.
StatusOr<Buffer> NarrowEmbeddings(Buffer message, WireDtype dtype);

// Fills all arrays of `space`; `rows[n]` is the row of sign number n. Sums run over a sample's IDs
// in their order, duplicates included, each ID's hash-stack buckets in the order of the rounds: see
// bags.h.
void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space);

// A batch, and which embedding worker holds it.
// The index is not part of the key: workers do not know their own, and a client uses it to find the
// channel.
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
  // Into LookupResult::unpooled: the rows are distinct ones, which the caller is to pool. -1: they
  // are the embeddings.
  int32_t unpooled = -1;
  const float* rows = nullptr;               // [num_rows, dim]
  const int64_t* index = nullptr;            // raw: [batch_size, sample_fixed_size]
  const uint32_t* sample_num_ids = nullptr;  // raw: [batch_size]
};

// Movable, and its views stay valid when it moves: they point into memory that `storage` and
// `widened` own, not into the object.
struct LookupResult {
  BatchReference reference;  // reference.reference == 0: no gradient is expected
  uint32_t batch_size = 0;
  std::vector<SlotEmbedding> slots;
  Buffer storage;
  std::vector<Buffer> widened;  // rows that came with 16 bits, and embeddings pooled here
  // The slots that came as rows and were pooled here, in the order of `slots`: what their gradients
  // are summed by.
  std::vector<DistinctSlot> distinct;
  // The slots that the caller pools, whose gradients it sums.
  std::vector<DistinctSlot> unpooled;
};

// Decodes the message in place; kCorruption names what is wrong. Sizes, indices and dims are
// checked (an index never points past the rows), for model code uses what comes out without another
// look.
// Used at both ends: by the client, and by a worker that narrows its own message. `as_rows`: slots
// that came as rows are left to the caller, but for those with weights.
StatusOr<LookupResult> DecodeEmbeddings(uint32_t worker_index, Buffer message,
                                        bool as_rows = false);

}  // namespace persia::worker

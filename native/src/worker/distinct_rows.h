// Distinct rows on the wire (docs/adr/0039-distinct-rows-on-the-wire.md): where a pooled slot's
// distinct rows are fewer bytes than its pooled embeddings, the embedding worker sends the rows and
// which of them each ID needs. The rank pools them, and returns one gradient for each row.
//
// Both ends use bags.h in the same order, so embeddings and sums have the bits that the worker
// would have made. A slot that shares its rows with another slot of the batch is always pooled: the
// sums of both belong together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "worker/bags.h"
#include "worker/lookup_plan.h"
#include "worker/types.h"

namespace persia::worker {

// Arrays of a message begin at multiples of 8.
inline uint64_t Padded(uint64_t size_bytes) { return (size_bytes + 7) / 8 * 8; }

// ---- the worker's end

// How a slot's distinct rows are laid out in a message.
struct RowsLayout {
  uint64_t index_bytes = 0;  // of everything between the slot's name and its rows
  uint8_t count_bytes = 0;   // a sample's number of IDs; 0: each sample has one
  uint8_t number_bytes = 0;  // a row number
};

// Whether the slot is sent as rows in this form; then also fills `layout`. kFewestBytes counts the
// slot's embeddings, and its gradients where `requires_grad`.
bool IsSentAsRows(const LookupPlan& plan, const PlannedFeature& feature, EmbeddingsForm form,
                  bool requires_grad, RowsLayout* layout);

// Writes `layout.index_bytes` bytes to `out`.
void PutRowsIndex(const PlannedFeature& feature, uint32_t first_number, const RowsLayout& layout,
                  std::byte* out);

// ---- the rank's end

// Which rows each sample of a slot is the sum of. Kept by the rank until it returns the gradients.
// Owns its arrays, so it outlives the message.
struct DistinctSlot {
  std::string name;
  uint32_t dim = 0;
  uint32_t num_rows = 0;  // distinct
  uint32_t batch_size = 0;
  uint32_t rows_per_id = 1;
  Scaling scaling = Scaling::kNone;
  std::vector<uint32_t> offsets = {};  // [batch_size + 1]; empty: each sample has one ID
  std::vector<uint32_t> numbers = {};  // [IDs x rows_per_id], each below num_rows
  std::vector<float> weights = {};     // one an ID; empty: all 1

  Bags bags() const;  // views of this
  size_t size_bytes() const;
};

// Reads what PutRowsIndex() wrote into `slot`, whose name, dim, num_rows and batch_size are set.
// kCorruption says what is wrong. The caller checks that the reader is still ok. No memory is taken
// for more elements than the message has.
Status ReadRowsIndex(ByteReader* reader, DistinctSlot* slot);

// `out` [batch_size, dim] becomes the pooled embeddings; `rows` is [num_rows, dim].
void PoolDistinct(const DistinctSlot& slot, const float* rows, float* out);

// `sums` [num_rows, dim] become the sums of `gradients` [batch_size, dim] by row, times
// `inverse_scale`. False, and `sums` without meaning, where a gradient or a sum is not finite: the
// worker has to be sent the gradients themselves then, for it leaves out whole slots.
bool SumByRow(const DistinctSlot& slot, const float* gradients, float inverse_scale, float* sums,
              float* max_magnitude);

}  // namespace persia::worker

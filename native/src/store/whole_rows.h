// Whole rows: a row's embedding, optimizer state and scalar as one array of floats, in this order.
//
// A rank that replays its own updates (client/exact_rows.h) needs what a server's optimizer needs.
// The scalar, an accumulator or a step count, is copied as 32 bits and never used as a float here.
#pragma once

#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/status.h"
#include "base/train_config.h"
#include "store/embedding_store.h"
#include "store/row_slabs.h"

namespace persia::store {

// Floats of a row of this shape, without what features keep behind its state.
uint32_t WholeRowFloats(const RowShape& shape);
// `row` has the shape; `floats` has WholeRowFloats().
void CopyWholeRow(const RowView& row, const RowShape& shape, float* floats);
void SetWholeRow(const float* floats, const RowShape& shape, const RowView& row);

// kFailedPrecondition, naming the setting and what to do: rows of the config may change by other
// means than the updates of training batches, so a replay would not give the server's row.
Status CheckReplayable(const TrainConfig& config);

// A training lookup: rows of new signs are inserted. Returns the whole rows of all blocks, in the
// order of their signs; each row is read at one moment. kFailedPrecondition as CheckReplayable(),
// also for stores with a tier, with 16-bit rows, or that have evicted rows.
StatusOr<Buffer> LookupWholeRows(std::span<const RowBlock> blocks, EmbeddingStore* store,
                                 LookupReport* report);

}  // namespace persia::store

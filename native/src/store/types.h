// The plain data of this layer: what callers hand to a store, and what it reports.
//
// Structs without behaviour beyond sums and offsets, so that a file includes what it exchanges with
// others and not the class that happens to produce it. Spans and pointers are borrowed: the caller
// keeps the memory until the call returns.
//
// A *sign* is the 64-bit number of a row as callers know it, a *key* the same number scrambled
// (SignKey in sign_index.h), by which shards and indexes store it. Rows are float32 here, whatever
// their format in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "pool/row_pool.h"

namespace persia::store {

// The widest row that a store takes, in elements. Formats and messages refuse wider ones too, so
// that a damaged dim never asks for more memory than a row may need.
inline constexpr uint32_t kMaxDim = 65536;

// `signs` of one dim. A request is a list of blocks; its rows are laid out block after block,
// row-major. No sign occurs twice in one request: an update would apply the optimizer twice to its
// row, the second time to other weights than the gradient was computed with.
struct RowBlock {
  uint32_t dim = 0;
  std::span<const uint64_t> signs;
};

// Both read the same values for a row that exists; the modes differ in what they change.
enum class LookupMode : uint8_t {
  kTrain = 0,      // inserts missing signs (subject to admission), refreshes the LRU order
  kInference = 1,  // missing signs read as zeros; changes nothing
};

// What a lookup found and did, or what all of them did since the store was made.
struct LookupReport {
  uint64_t num_missing = 0;  // signs without a row before the call
  uint64_t num_inserted = 0;
  uint64_t num_unadmitted = 0;  // refused by admission: read as zeros
  uint64_t num_evicted = 0;
  uint64_t num_expired = 0;  // only in totals: their time to live was over
  uint64_t num_small = 0;    // only in totals: removed by RemoveSmallRows()

  LookupReport& operator+=(const LookupReport& other) {
    num_missing += other.num_missing;
    num_inserted += other.num_inserted;
    num_unadmitted += other.num_unadmitted;
    num_evicted += other.num_evicted;
    num_expired += other.num_expired;
    num_small += other.num_small;
    return *this;
  }
};

// What an update did, or what all of them did. Of an update that succeeded, the three add up to the
// rows of the request.
struct UpdateReport {
  uint64_t num_updated = 0;
  uint64_t num_missing = 0;    // evicted or never admitted: their gradients were skipped
  uint64_t num_nonfinite = 0;  // unchanged: their gradients were NaN or infinite

  UpdateReport& operator+=(const UpdateReport& other) {
    num_updated += other.num_updated;
    num_missing += other.num_missing;
    num_nonfinite += other.num_nonfinite;
    return *this;
  }
};

// The state of a store. Shards are asked one after another, so that with calls in progress the
// numbers are not all of one moment.
// Each shard is locked in turn: for a status page, not for each batch.
struct StoreStats {
  uint64_t num_rows = 0;
  uint64_t memory_bytes = 0;  // index, slabs and order: everything the store holds
  LookupReport lookups;       // totals since start
  UpdateReport updates;       // totals since start
};

// How many rows were changed, inserted or removed since changes were last taken. After an overflow
// only a full snapshot helps whoever follows the store.
struct ChangeStatus {
  uint64_t max_rows = 0;  // 0: changes are not tracked
  uint64_t num_rows = 0;
  bool is_due = false;          // half of max_rows: time to take them
  bool has_overflowed = false;  // more than max_rows: which rows changed is not known any more
};

// Where a store with a tier keeps its rows, and how many of them are resident.
//
// The cache bounds memory, not the number of rows: that is the store's capacity, which cold rows
// count for like resident ones.
// Read once, when the store is opened. Rows that are cold cost index memory alone (cold_rows.h).
struct TierOptions {
  std::string directory;   // of the tier's files; must exist
  pool::PoolOptions pool;  // the store sets the schema
  // The cache of resident rows: exactly one of the two is given. The internal shards divide it. A
  // number of bytes covers the resident rows with their state, and up to 40 bytes of index for each
  // row of the tier.
  uint64_t cache_rows = 0;
  uint64_t cache_bytes = 0;
};

// What a store with a tier counts; totals since it was opened where nothing else is said.
struct TierStats {
  uint64_t num_rows = 0;        // now, resident and cold
  uint64_t num_hot = 0;         // now resident
  uint64_t hot_bytes = 0;       // that the resident rows take
  uint64_t memory_bytes = 0;    // everything that cache_bytes counts
  uint64_t num_hits = 0;        // resident rows that lookups found
  uint64_t num_misses = 0;      // cold rows that lookups read
  uint64_t num_promoted = 0;    // cold rows that became resident
  uint64_t num_prefetched = 0;  // those of them that Prefetch() named
  uint64_t num_unheeded = 0;    // signs that Prefetch() dropped for want of room
  uint64_t num_demoted = 0;     // resident rows that became cold
  uint64_t num_passes = 0;      // over a shard's index, to find rows to demote
  uint64_t num_written = 0;     // row versions written to the tier
  uint64_t num_moved = 0;       // resident rows moved, so that memory could be given back
  uint64_t batch = 0;           // version of changes made now; pool.committed + 1: nothing changed
  Status last_error;            // why maintenance is stuck and retries; Ok: it is not
  pool::PoolStats pool;
};

// A row of a request as an internal shard gets it; SignsByShard groups them. The key
// is computed once for a request: shard, index and policy all start from it.
struct RowRef {
  uint64_t key;  // SignKey of the sign
  uint32_t row;  // its number in the request
};

// Rows of one shard and one block. A shard is given all of a request's runs at once, so that it is
// locked once.
struct Run {
  uint32_t dim;
  uint64_t first_row;    // of the block
  uint64_t first_float;  // of the block, in the request's floats
  std::span<const RowRef> refs;

  // Where the row's floats begin among those of the request.
  uint64_t FloatOffset(const RowRef& ref) const {
    return first_float + (ref.row - first_row) * dim;
  }
};

// A row of a request that was not found. Both pointers lead into the request's plan, and are valid
// until the thread's next request.
// Refers to the plan instead of copying it: a lookup that inserts thousands of rows collects as
// many of these under the shard's lock.
struct MissingRef {
  const Run* run;
  const RowRef* ref;
};

// Where the rows of one shard's part of a lookup are, for the update that follows.
struct FoundCells {
  static constexpr uint64_t kGone = UINT64_MAX;

  std::span<uint32_t> by_row = {};  // cells, by row of the request
  // RowTable::num_removals() at the lookup, as long as which cells hold; kGone: not all rows were
  // found.
  uint64_t num_removals = kGone;
};

// Rows of a checkpoint. They have one dim; the arrays are equally long, in the order of `signs`.
// Applied in pieces, one of these for each block of a file: what a block holds has one optimizer,
// so state and scalars are either given for all of its rows or for none.
struct LoadedRows {
  uint32_t dim = 0;
  std::span<const uint64_t> signs;
  // Batches between the row's last use and the snapshot point, in its internal shard then: the
  // order of eviction, in a form that does not depend on when the store began to count.
  std::span<const uint32_t> ages;
  const float* embeddings = nullptr;  // [signs.size(), dim]
  // [signs.size(), state floats of the store's optimizer], or null: a new row's state.
  const float* state = nullptr;
  const uint32_t* scalars = nullptr;  // [signs.size()], where state is given and there are any
};

// What a follower applies in one step: the rows of a packet and the signs of rows that are gone. No
// sign occurs twice, so that their order does not matter.
// Borrowed as all of this file: the blocks of a packet stay decoded until the call returns.
struct Changes {
  bool from_nothing = false;  // all rows are removed first
  std::vector<std::span<const uint64_t>> removals;
  std::vector<LoadedRows> rows;
};

}  // namespace persia::store

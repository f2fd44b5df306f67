#include "store/whole_rows.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "store/row_policy.h"

namespace persia::store {
namespace {

Status Refuse(const std::string& setting, const char* remedy) {
  return FailedPrecondition("consistency='exact' replays updates on the rank, which ", setting,
                            " would change: ", remedy, ", or use consistency='synchronous'");
}

// Everything by which a server removes or refuses a row unasked: the rank would replay an update
// of a row that the server has no more, and the two would differ for ever.
Status CheckRows(const RowConfig& rows) {
  if (rows.admit_probability < 1.0f) {
    return Refuse("admit_probability " + std::to_string(rows.admit_probability), "set it to 1");
  }
  if (rows.admit_after > 1) {
    return Refuse("admit_after " + std::to_string(rows.admit_after), "set it to 1");
  }
  if (rows.time_to_live_sec > 0.0f) {
    return Refuse("time_to_live_sec " + std::to_string(rows.time_to_live_sec), "set it to 0");
  }
  if (rows.min_norm > 0.0f) {
    return Refuse("min_norm " + std::to_string(rows.min_norm), "set it to 0");
  }
  if (rows.capacity > 0) {
    return Refuse("the capacity " + std::to_string(rows.capacity) + " of a slot", "leave it out");
  }
  return Status::Ok();
}

// Asked at every lookup, not once: a config may be replaced while a rank trains.
Status CheckStore(EmbeddingStore* store) {
  if (const auto config = store->config()) PERSIA_RETURN_IF_ERROR(CheckReplayable(*config));
  ShardSet& shards = store->shards();
  if (shards.tier() != nullptr) return Refuse("a storage tier", "keep all rows in memory");
  if (shards.all()[0].format().dtype() == RowDtype::kFloat32) return Status::Ok();
  return Refuse("the rounding of a 16-bit row_dtype", "set row_dtype to float32");
}

// Where each row begins, and the floats of all behind them. The store is locked.
std::vector<uint64_t> LayOut(std::span<const RowBlock> blocks, const RowPolicies& policies) {
  std::vector<uint64_t> begins = {0};
  for (const RowBlock& block : blocks) {
    const RowPolicy* policy = nullptr;
    uint32_t num_floats = 0;
    for (const uint64_t sign : block.signs) {
      if (const RowPolicy& of_sign = policies.Of(sign); policy != &of_sign) {
        policy = &of_sign;
        num_floats = WholeRowFloats(policy->ShapeFor(block.dim));
      }
      begins.push_back(begins.back() + num_floats);
    }
  }
  return begins;
}

Status CopyRows(Shard& shard, std::span<const Run> runs, std::span<const uint64_t> begins,
                float* floats) {
  const std::lock_guard lock(shard.mutex());
  // Rows may be evicted between a batch's lookup and its update, which the rank would not notice.
  if (shard.totals().lookups.num_evicted > 0) {
    return Refuse("eviction, which a parameter server has begun,", "raise its capacity");
  }
  const RowSlabs& slabs = shard.table().slabs();
  for (const Run& run : runs) {
    for (const RowRef& ref : run.refs) {
      const SignIndex::Entry* entry = shard.table().index().Find(ref.key);
      if (entry == nullptr || slabs.dim(entry->cell) != run.dim) {
        return Unavailable("rows were removed or replaced during their lookup: try again");
      }
      CopyWholeRow(slabs.View(entry->cell), slabs.shape(entry->cell), floats + begins[ref.row]);
    }
  }
  return Status::Ok();
}

}  // namespace

uint32_t WholeRowFloats(const RowShape& shape) {
  return shape.dim + shape.state_floats + (shape.has_scalar ? 1 : 0);
}

// The order of the wire: embedding, state, and the bits of the scalar as one float. The scalar is
// copied by bytes, as some of its values are NaN when read as a float.
void CopyWholeRow(const RowView& row, const RowShape& shape, float* floats) {
  floats = std::copy_n(row.values, shape.dim, floats);
  floats = std::copy_n(row.state, shape.state_floats, floats);
  if (shape.has_scalar) std::memcpy(floats, row.scalar, sizeof(*row.scalar));
}

void SetWholeRow(const float* floats, const RowShape& shape, const RowView& row) {
  std::copy_n(floats, shape.dim, row.values);
  std::copy_n(floats + shape.dim, shape.state_floats, row.state);
  if (!shape.has_scalar) return;
  std::memcpy(row.scalar, floats + shape.dim + shape.state_floats, sizeof(*row.scalar));
}

Status CheckReplayable(const TrainConfig& config) {
  PERSIA_RETURN_IF_ERROR(CheckRows(config));
  for (const GroupConfig& group : config.groups) PERSIA_RETURN_IF_ERROR(CheckRows(group.rows));
  return Status::Ok();
}

// In two passes: the first inserts, by the code of every lookup; the second reads embedding and
// state of a row under one lock, so that no update is in one of them and not in the other.
StatusOr<Buffer> LookupWholeRows(std::span<const RowBlock> blocks, EmbeddingStore* store,
                                 LookupReport* report) {
  PERSIA_RETURN_IF_ERROR(CheckStore(store));
  uint64_t num_floats = 0;
  for (const RowBlock& block : blocks) num_floats += uint64_t{block.dim} * block.signs.size();
  thread_local std::vector<float> embeddings;
  embeddings.resize(num_floats);
  ShardSet& shards = store->shards();
  if (!shards.IsConfigured()) {
    return FailedPrecondition("a training lookup came before Configure; configure the store first");
  }
  const auto lock = shards.EnterForChange();
  LookupReport counts;
  // Not by store->Lookup(), which remembers lookups (ADR 65): no update in exact mode matches one.
  const Status status = shards.ForEach(blocks, [&](Shard& shard, std::span<const Run> runs) {
    return shard.Lookup(runs, LookupMode::kTrain, embeddings.data(), &counts);
  });
  if (report != nullptr) *report = counts;
  PERSIA_RETURN_IF_ERROR(status);
  const std::vector<uint64_t> begins = LayOut(blocks, *shards.all()[0].table().policies());
  Buffer rows(begins.back() * sizeof(float));
  auto* floats = reinterpret_cast<float*>(rows.data());
  PERSIA_RETURN_IF_ERROR(shards.ForEach(blocks, [&](Shard& shard, std::span<const Run> runs) {
    return CopyRows(shard, runs, begins, floats);
  }));
  return rows;
}

}  // namespace persia::store

// EmbeddingStore::RemoveSmallRows.
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "store/embedding_store.h"
#include "store/probe_in_blocks.h"

namespace persia::store {
namespace {

using Entry = SignIndex::Entry;

// How many entries a shard's mutex is held for.
constexpr size_t kEntriesAtATime = 512;

// In double and in order, so that the same rows are removed on every machine.
double SquaredNorm(const float* values, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) sum += double{values[i]} * values[i];
  return sum;
}

bool IsCold(const Shard& shard, const Entry& entry) {
  return shard.cache() != nullptr && IsCold(shard.table().slabs(), entry.cell);
}

// Infinite where the row cannot be read: then it stays, and the tier has failed.
double SquaredNormOf(const Shard& shard, const Entry& entry) {
  const RowSlabs& slabs = shard.table().slabs();
  if (!IsCold(shard, entry)) {
    const RowView row = slabs.View(entry.cell);
    if (shard.format().narrow() == nullptr) return SquaredNorm(row.values, row.dim);
    std::vector<float> values(row.dim);
    shard.format().Read(values.data(), row.values, row.dim);
    return SquaredNorm(values.data(), row.dim);
  }
  const uint32_t dim = ColdRowOf(slabs, entry.cell).dim;
  std::vector<float> values(dim);
  const Status status = shard.cache()->CopyCold(entry, dim, values.data());
  shard.cache()->tier().Fail(status);
  return status.ok() ? SquaredNorm(values.data(), dim) : std::numeric_limits<double>::infinity();
}

// Passes over some entries from the key *next on; false: no more are left. Adds to *num_removed.
StatusOr<bool> RemoveSome(Shard* shard, uint64_t* next, uint64_t* num_removed) {
  const std::lock_guard lock(shard->mutex());
  ShardTable& table = shard->table();
  const RowPolicies* policies = table.policies();
  if (policies == nullptr) return false;
  const RowSlabs& slabs = table.slabs();
  // Copies: removing rows invalidates entries of the index, not keys.
  std::vector<Entry> entries;
  size_t num_passed = 0, num_cold = 0;
  const bool has_ended = table.index().ForEachFrom(next, [&](const Entry& entry) {
    if (num_passed++ == kEntriesAtATime || num_cold == kColdRowsAtATime) return false;
    if (policies->OfKey(entry.key).min_norm() <= 0) return true;
    entries.push_back(entry);
    num_cold += IsCold(*shard, entry);
    return true;
  });
  for (const Entry& entry : entries) {
    TouchRow(slabs.values(entry.cell), shard->format().EmbeddingFloats(slabs.dim(entry.cell)));
  }
  for (const Entry& entry : entries) {
    const double min_norm = policies->OfKey(entry.key).min_norm();
    if (SquaredNormOf(*shard, entry) >= min_norm * min_norm) continue;
    PERSIA_RETURN_IF_ERROR(table.Remove(table.index().Find(entry.key)));
    ++shard->totals().lookups.num_small;
    ++*num_removed;
  }
  return !has_ended;
}

}  // namespace

// Not during a snapshot: each row that is removed would have to be saved for it first.
StatusOr<uint64_t> EmbeddingStore::RemoveSmallRows() {
  const auto config = shards_.config();
  if (!config.has_value() || !config->HasMinNorm()) return uint64_t{0};
  PERSIA_RETURN_IF_ERROR(shards_.features().Occupy("removal of small rows"));
  uint64_t num_removed = 0;
  Status status;
  for (Shard& shard : shards_.all()) {
    uint64_t next = 0;
    StatusOr<bool> has_more = true;
    while (has_more.ok() && *has_more) {
      const std::shared_lock lock(shards_.mutex());
      if (shards_.tier() != nullptr) shards_.tier()->CountBatch();  // rows change
      has_more = RemoveSome(&shard, &next, &num_removed);
    }
    status = has_more.status();
    if (!status.ok()) break;
  }
  shards_.features().Release();
  if (!status.ok()) return status;
  return num_removed;
}

}  // namespace persia::store

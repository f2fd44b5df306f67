// The part of Shard that removes rows with small embeddings.
#include <algorithm>
#include <limits>
#include <vector>

#include "store/shard.h"
#include "store/touch.h"

namespace persia::store {
namespace {

double SquaredNorm(const float* values, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) sum += double{values[i]} * values[i];
  return sum;
}

}  // namespace

double Shard::SquaredNormOf(const Entry& entry) const {
  const RowSlabs& slabs = table_.slabs();
  if (cache_ == nullptr || !IsCold(slabs, entry.slot)) {
    const RowView row = slabs.View(entry.slot);
    if (format_.narrow() == nullptr) return SquaredNorm(row.values, row.dim);
    std::vector<float> values(row.dim);
    format_.Read(values.data(), row.values, row.dim);
    return SquaredNorm(values.data(), row.dim);
  }
  std::vector<float> values(ColdCellOf(slabs, entry.slot).dim);
  const auto dim = static_cast<uint32_t>(values.size());
  const Status status = cache_->CopyCold(entry, dim, values.data());
  cache_->tier().Fail(status);
  return status.ok() ? SquaredNorm(values.data(), dim) : std::numeric_limits<double>::infinity();
}

StatusOr<bool> Shard::RemoveSmallRows(size_t max_rows, uint64_t* next, uint64_t* num_removed) {
  std::lock_guard lock(mutex_);
  const RowPolicies* policies = table_.policies();
  if (policies == nullptr) return false;
  const RowSlabs& slabs = table_.slabs();
  std::vector<Entry> entries;
  size_t num_passed = 0, num_cold = 0;
  const bool has_ended = table_.index().ForEachFrom(*next, [&](const Entry& entry) {
    if (num_passed++ == max_rows || num_cold == kColdRowsAtATime) {
      *next = entry.key;
      return false;
    }
    if (policies->OfKey(entry.key).min_norm() <= 0) return true;
    entries.push_back(entry);
    num_cold += cache_ != nullptr && IsCold(slabs, entry.slot);
    return true;
  });
  for (const auto& entry : entries) {
    TouchRow(slabs.values(entry.slot), format_.EmbeddingFloats(slabs.dim(entry.slot)));
  }
  std::erase_if(entries, [&](const Entry& entry) {
    const double min_norm = policies->OfKey(entry.key).min_norm();
    return SquaredNormOf(entry) >= min_norm * min_norm;
  });
  for (const auto& entry : entries) {
    PERSIA_RETURN_IF_ERROR(table_.Remove(table_.index().Find(entry.key)));
    ++lookups_.num_small;
    ++*num_removed;
  }
  return !has_ended;
}

}  // namespace persia::store

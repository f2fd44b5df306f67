// The part of Shard that removes rows with small embeddings.
#include <algorithm>
#include <limits>
#include <vector>

#include "store/shard.h"
#include "store/tier.h"
#include "store/tier_cells.h"
#include "store/touch.h"

namespace persia::store {
namespace {

double SquaredNorm(const float* values, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) sum += double{values[i]} * values[i];
  return sum;
}

}  // namespace

double Shard::SquaredNormOf(const SignIndex::Entry& entry) const {
  if (tier_ == nullptr || !IsCold(slabs_, entry.slot)) {
    const RowView row = slabs_.View(entry.slot);
    if (format_.narrow() == nullptr) return SquaredNorm(row.values, row.dim);
    std::vector<float> values(row.dim);
    format_.Read(values.data(), row.values, row.dim);
    return SquaredNorm(values.data(), row.dim);
  }
  std::vector<float> values(ColdCellOf(slabs_, entry.slot).dim);
  const auto dim = static_cast<uint32_t>(values.size());
  const Status status = CopyCold(entry, dim, values.data());
  tier_->Fail(status);
  return status.ok() ? SquaredNorm(values.data(), dim) : std::numeric_limits<double>::infinity();
}

StatusOr<bool> Shard::RemoveSmallRows(size_t max_rows, uint64_t* next, uint64_t* num_removed) {
  std::lock_guard lock(mutex_);
  if (rules_ == nullptr) return false;
  std::vector<SignIndex::Entry> entries;
  size_t num_passed = 0, num_cold = 0;
  const bool has_ended = index_.ForEachFrom(*next, [&](const SignIndex::Entry& entry) {
    if (num_passed++ == max_rows || num_cold == kColdRowsAtATime) {
      *next = entry.key;
      return false;
    }
    if (rules_->OfKey(entry.key).min_norm() <= 0) return true;
    entries.push_back(entry);
    num_cold += tier_ != nullptr && IsCold(slabs_, entry.slot);
    return true;
  });
  for (const auto& entry : entries) {
    TouchRow(slabs_.values(entry.slot), format_.EmbeddingFloats(slabs_.dim(entry.slot)));
  }
  std::erase_if(entries, [&](const SignIndex::Entry& entry) {
    const double min_norm = rules_->OfKey(entry.key).min_norm();
    return SquaredNormOf(entry) >= min_norm * min_norm;
  });
  for (const auto& entry : entries) {
    PERSIA_RETURN_IF_ERROR(Remove(index_.Find(entry.key)));
    ++lookups_.num_small;
    ++*num_removed;
  }
  return !has_ended;
}

}  // namespace persia::store

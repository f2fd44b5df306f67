#include "store/recent_lookups.h"

#include <algorithm>
#include <utility>

#include "base/hash.h"

namespace persia::store {
namespace {

// Tells most requests apart without a look at all signs.
uint64_t SampleOf(std::span<const RowBlock> blocks) {
  uint64_t sample = blocks.size();
  for (const RowBlock& block : blocks) {
    sample = SignHash(sample ^ (uint64_t{block.dim} << 32 ^ block.signs.size()));
    for (size_t i = 0; i < block.signs.size(); i += block.signs.size() / 8 + 1) {
      sample = SignHash(sample ^ block.signs[i]);
    }
  }
  return sample;
}

}  // namespace

void FoundRows::Begin(uint32_t num_shards) {
  if (signs.num_rows() > cells.capacity()) cells = {};  // as in SignsByShard
  cells.resize(signs.num_rows());
  cells_by_shard.assign(num_shards, {.by_row = cells});
}

void RecentLookups::List::Add(std::unique_ptr<FoundRows> added) {
  bytes += added->memory_bytes();
  rows.push_back(std::move(added));
}

std::unique_ptr<FoundRows> RecentLookups::List::Remove(size_t place) {
  std::unique_ptr<FoundRows> removed = std::move(rows[place]);
  rows.erase(rows.begin() + static_cast<ptrdiff_t>(place));
  bytes -= removed->memory_bytes();
  return removed;
}

std::unique_ptr<FoundRows> RecentLookups::Begin() {
  const std::lock_guard lock(mutex_);
  if (unused_.rows.empty()) return std::make_unique<FoundRows>();
  return unused_.Remove(unused_.rows.size() - 1);
}

void RecentLookups::Keep(std::span<const RowBlock> blocks, std::unique_ptr<FoundRows> rows) {
  if (rows->memory_bytes() > kMaxLookupBytes) return;
  rows->sample = SampleOf(blocks);
  std::vector<std::unique_ptr<FoundRows>> dropped;  // freed without the lock
  const std::lock_guard lock(mutex_);
  kept_.Add(std::move(rows));
  // The next lookup uses the memory of one that is forgotten.
  while (kept_.bytes > kMaxBytes - kMaxLookupBytes || kept_.rows.size() > kMaxKept) {
    dropped.push_back(kept_.Remove(0));
  }
  while (kept_.bytes + unused_.bytes > kMaxBytes) dropped.push_back(unused_.Remove(0));
  while (!dropped.empty() && Reuse(&dropped.back())) dropped.pop_back();
}

std::unique_ptr<FoundRows> RecentLookups::Take(std::span<const RowBlock> blocks) {
  const uint64_t sample = SampleOf(blocks);
  std::unique_ptr<FoundRows> rows;
  {
    const std::lock_guard lock(mutex_);
    size_t place = kept_.rows.size();
    while (place > 0 && kept_.rows[place - 1]->sample != sample) --place;
    if (place == 0) return nullptr;
    rows = kept_.Remove(place - 1);
  }
  if (rows->signs.AreOf(blocks)) return rows;
  End(std::move(rows));
  return nullptr;
}

void RecentLookups::End(std::unique_ptr<FoundRows> rows) {
  const std::lock_guard lock(mutex_);
  Reuse(&rows);
}

// Not where the latest lookup needed much less: it was counted as a large one, and many of these
// would leave no room for others.
bool RecentLookups::Reuse(std::unique_ptr<FoundRows>* rows) {
  constexpr size_t kFewBytes = size_t{128} << 10;
  const size_t bytes = (*rows)->memory_bytes();
  if (bytes > kFewBytes && bytes / 2 > (*rows)->row_bytes()) return false;
  if (unused_.rows.size() == kMaxUnused || kept_.bytes + unused_.bytes + bytes > kMaxBytes) {
    return false;
  }
  unused_.Add(std::move(*rows));
  return true;
}

uint64_t RecentLookups::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_.bytes + unused_.bytes;
}

}  // namespace persia::store

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
  cells.resize(signs.num_rows());
  cells_by_shard.assign(num_shards, {.by_row = cells});
}

std::unique_ptr<FoundRows> RecentLookups::Begin() {
  const std::lock_guard lock(mutex_);
  if (unused_.empty()) return std::make_unique<FoundRows>();
  std::unique_ptr<FoundRows> rows = std::move(unused_.back());
  unused_.pop_back();
  return rows;
}

void RecentLookups::Keep(std::span<const RowBlock> blocks, std::unique_ptr<FoundRows> rows) {
  rows->sample = SampleOf(blocks);
  std::vector<std::unique_ptr<FoundRows>> dropped;  // freed without the lock
  const std::lock_guard lock(mutex_);
  kept_bytes_ += rows->memory_bytes();
  kept_.push_back(std::move(rows));
  while (kept_bytes_ > kMaxBytes) {
    kept_bytes_ -= kept_.front()->memory_bytes();
    dropped.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
  while (!dropped.empty() && unused_.size() < kMaxUnused) {
    unused_.push_back(std::move(dropped.back()));
    dropped.pop_back();
  }
}

std::unique_ptr<FoundRows> RecentLookups::Take(std::span<const RowBlock> blocks) {
  const uint64_t sample = SampleOf(blocks);
  std::unique_ptr<FoundRows> rows;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                    [&](const auto& kept) { return kept->sample == sample; });
    if (found == kept_.rend()) return nullptr;
    rows = std::move(*found);
    kept_bytes_ -= rows->memory_bytes();
    kept_.erase(std::next(found).base());
  }
  if (rows->signs.AreOf(blocks)) return rows;
  End(std::move(rows));
  return nullptr;
}

void RecentLookups::End(std::unique_ptr<FoundRows> rows) {
  const std::lock_guard lock(mutex_);
  if (unused_.size() < kMaxUnused) unused_.push_back(std::move(rows));
}

uint64_t RecentLookups::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t size = kept_bytes_;
  for (const auto& rows : unused_) size += rows->memory_bytes();
  return size;
}

}  // namespace persia::store

#include "store/change_set.h"

#include <algorithm>
#include <bit>

#include "store/probe_in_blocks.h"
#include "store/sign_index.h"

namespace persia::store {
namespace {

// At most half of the cells are in use, but for what threads add while others reach the end.
constexpr uint64_t kMinCells = uint64_t{1} << 14;
// Keys are hashes: that so many cells in a row are taken does not happen by chance.
constexpr uint64_t kMaxProbes = 1024;

}  // namespace

ChangeSet::ChangeSet(uint64_t max_keys)
    : max_keys_(max_keys),
      bits_(static_cast<uint32_t>(std::bit_width(std::max(2 * max_keys, kMinCells) - 1))),
      cells_(std::make_unique<Cell[]>(num_cells())) {}

void ChangeSet::Add(std::span<const uint64_t> keys) {
  if (has_overflowed()) return;
  // All misses at once; a single key has nothing to overlap with.
  if (keys.size() > 1) {
    for (const uint64_t key : keys) Touch(cells_[HomeOf(key)]);
  }
  uint64_t num_added = 0;
  bool has_room = true;
  for (const uint64_t key : keys) {
    const Outcome outcome = AddOne(key);
    num_added += outcome == Outcome::kAdded ? 1 : 0;
    has_room &= outcome != Outcome::kNoRoom;
  }
  if (num_added == 0 && has_room) return;
  const uint64_t size = size_.fetch_add(num_added, std::memory_order_relaxed) + num_added;
  if (size > max_keys_ || !has_room) has_overflowed_.store(true, std::memory_order_relaxed);
}

// Linear probing. A cell once taken never changes, so relaxed order is enough: the set is read as a
// whole only after the store was locked exclusively.
ChangeSet::Outcome ChangeSet::AddOne(uint64_t key) {
  if (key == 0) {
    const bool was_there = has_key_zero_.exchange(true, std::memory_order_relaxed);
    return was_there ? Outcome::kWasThere : Outcome::kAdded;
  }
  const uint64_t mask = num_cells() - 1;
  for (uint64_t i = 0; i < kMaxProbes; ++i) {
    Cell& cell = cells_[(HomeOf(key) + i) & mask];
    uint64_t found = cell.load(std::memory_order_relaxed);
    if (found == 0 && cell.compare_exchange_strong(found, key, std::memory_order_relaxed)) {
      return Outcome::kAdded;
    }
    if (found == key) return Outcome::kWasThere;
  }
  return Outcome::kNoRoom;
}

// By the rules of AddOne(): a key is at the first place that was free when it was added, and cells
// never become free again.
bool ChangeSet::Contains(uint64_t key) const {
  if (key == 0) return has_key_zero_.load(std::memory_order_relaxed);
  const uint64_t mask = num_cells() - 1;
  for (uint64_t i = 0; i < kMaxProbes; ++i) {
    const uint64_t found = cells_[(HomeOf(key) + i) & mask].load(std::memory_order_relaxed);
    if (found == key) return true;
    if (found == 0) return false;
  }
  return false;
}

template <typename Visit>
void ChangeSet::ForEach(Visit visit) const {
  if (has_key_zero_.load(std::memory_order_relaxed)) visit(uint64_t{0});
  for (uint64_t i = 0; i < num_cells(); ++i) {
    const uint64_t key = cells_[i].load(std::memory_order_relaxed);
    if (key != 0) visit(key);
  }
}

// Overflows where both together have too many: then only a full snapshot helps.
void ChangeSet::AddAll(const ChangeSet& other) {
  if (other.was_cleared()) NoteClear();
  ChangeBatch batch(this);
  other.ForEach([&](uint64_t key) { batch.Add(key); });
}

// Sorted, so that a snapshot passes over the index from front to back, and can tell by the key
// whether a row has been read.
std::vector<std::vector<uint64_t>> ChangeSet::KeysByShard(uint32_t num_shards) const {
  std::vector<std::vector<uint64_t>> keys(num_shards);
  for (auto& of_shard : keys) of_shard.reserve(size() / num_shards + size() / num_shards / 8);
  ForEach([&](uint64_t key) { keys[ShardOfKey(key, num_shards)].push_back(key); });
  for (auto& of_shard : keys) std::sort(of_shard.begin(), of_shard.end());
  return keys;
}

}  // namespace persia::store

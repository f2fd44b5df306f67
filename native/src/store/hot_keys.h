// HotKeys: which rows of a shard are in memory, where the others are in a pool (tier.h).
//
// So that finding those that leave takes no pass over all rows, which may be a hundred times as
// many. A key is noted when its row comes; that it has gone the list finds out by itself.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "store/probe_in_blocks.h"
#include "store/sign_index.h"

namespace persia::store {

class HotKeys {
 public:
  // Of a row that has come, perhaps not for the first time.
  void Add(uint64_t key) { keys_.push_back(key); }
  // Keys of rows that went, and repetitions, included.
  size_t size() const { return keys_.size(); }
  void Clear() { *this = {}; }
  // Gives back memory that is more than twice what the keys take; best after ForEach(). Constant
  // time per key forgotten since.
  void TrimMemory() {
    if (keys_.capacity() > 2 * keys_.size()) keys_.shrink_to_fit();
  }
  uint64_t memory_bytes() const { return keys_.capacity() * sizeof(uint64_t); }

  // Calls visit(entry) for each key whose entry is_hot() holds of, in ascending order, and forgets
  // the others.
  template <typename IsHot, typename Visit>
  void ForEach(const SignIndex& index, IsHot is_hot, Visit visit) {
    Sort();
    size_t num_kept = 0;
    ProbeInBlocks(
        keys_.size(), 0, [&](size_t i) { return std::pair(keys_[i], &index); },
        [](size_t, const SignIndex::Entry*) { return nullptr; },
        [&](size_t i, const SignIndex::Entry* entry, const float*) {
          if (entry == nullptr || !is_hot(*entry)) return;
          keys_[num_kept++] = keys_[i];
          visit(*entry);
        });
    keys_.resize(num_kept);
    num_sorted_ = num_kept;
  }

 private:
  void Sort() {
    const auto added = keys_.begin() + static_cast<std::ptrdiff_t>(num_sorted_);
    std::sort(added, keys_.end());
    std::inplace_merge(keys_.begin(), added, keys_.end());
    keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
  }

  std::vector<uint64_t> keys_;
  size_t num_sorted_ = 0;
};

}  // namespace persia::store

// PinnedRows: which rows were announced to be used soon, lately.
//
// Those stay in the cache though they were not used for long. A row is remembered for a number of
// announcements, then forgotten by itself, whether it was used or not. A table of bits: some rows
// that were not announced are taken for such, which keeps them for a while.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace persia::store {

class PinnedRows {
 public:
  PinnedRows() = default;
  // Remembers the last `count` rows, and up to as many before them.
  explicit PinnedRows(uint64_t count)
      : count_(std::clamp<uint64_t>(count, 1, kMaxCount)),
        newest_(std::bit_ceil(std::max<uint64_t>(count_ * kBitsPerRow / 64, 1))),
        older_(newest_.size()) {}

  void Add(uint64_t key) {
    newest_[WordOf(key)] |= BitOf(key);
    if (++num_newest_ < count_) return;
    newest_.swap(older_);
    std::fill(newest_.begin(), newest_.end(), 0);
    num_newest_ = 0;
  }
  bool Contains(uint64_t key) const {
    return ((newest_[WordOf(key)] | older_[WordOf(key)]) & BitOf(key)) != 0;
  }
  void Clear() { *this = PinnedRows(count_); }
  uint64_t memory_bytes() const { return 2 * newest_.size() * sizeof(uint64_t); }

 private:
  static constexpr uint64_t kMaxCount = 8192;
  static constexpr uint64_t kBitsPerRow = 8;

  // Keys are spread like hashes; their high bits are in order in an index, their low ones choose
  // the shard.
  uint64_t WordOf(uint64_t key) const { return (key >> 38) & (newest_.size() - 1); }
  static uint64_t BitOf(uint64_t key) { return uint64_t{1} << (key >> 32 & 63); }

  uint64_t count_ = 1;
  uint64_t num_newest_ = 0;
  std::vector<uint64_t> newest_{0};
  std::vector<uint64_t> older_{0};
};

}  // namespace persia::store

// Which rows of a shard are resident where there is a storage tier (row_cache.h): how many there
// may be (CacheBudget), which ones there are (HotKeys), and which ones stay (PinnedRows).
//
// None of these classes is thread-safe: the shard's mutex guards them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "store/probe_in_blocks.h"
#include "store/sign_index.h"

namespace persia::store {

// How many rows of a shard are resident, and how many may be: a number of rows, or as many as fit
// into a number of bytes.
//
// A budget of bytes covers everything that the shard keeps in memory for its rows, the index of the
// cold ones included. What that leaves is for resident rows, at least an eighth of all, so that a
// tier that has outgrown its cache stays usable. A sixteenth is kept free for the rows that a call
// may leave behind.
class CacheBudget {
 public:
  CacheBudget() = default;
  static CacheBudget OfRows(uint64_t limit) { return {limit, /*counts_bytes=*/false}; }
  static CacheBudget OfBytes(uint64_t limit) { return {limit, /*counts_bytes=*/true}; }

  bool counts_bytes() const { return counts_bytes_; }
  uint64_t num_rows() const { return num_rows_; }
  uint64_t num_bytes() const { return num_bytes_; }
  void Add(uint64_t row_bytes) {
    ++num_rows_;
    num_bytes_ += row_bytes;
  }
  void Remove(uint64_t row_bytes) {
    --num_rows_;
    num_bytes_ -= row_bytes;
  }
  void RemoveAll() { num_rows_ = num_bytes_ = 0; }
  // Bytes that the shard has in memory beside the resident rows.
  void SetBeside(uint64_t num_bytes) { beside_bytes_ = num_bytes; }

  // How many rows to demote. A budget of bytes assumes rows of the mean size; where smaller ones
  // are demoted, the next call asks for more.
  uint64_t Excess() const {
    if (Used() <= Target()) return 0;
    const uint64_t excess = Used() - Target();
    if (!counts_bytes_) return excess;
    const uint64_t mean = std::max<uint64_t>(num_bytes_ / num_rows_, 1);
    return std::min((excess + mean - 1) / mean, num_rows_);
  }
  // Whether it is exceeded by at most a `part`th.
  bool IsWithin(uint64_t part) const { return Used() <= Target() + Target() / part; }
  // Bytes of slabs beyond the budget, where resident rows have `slab_bytes` of them. A 32nd is
  // tolerated: giving slabs back costs a pass over the index.
  uint64_t ExcessOfSlabs(uint64_t slab_bytes) const {
    return slab_bytes <= Room() + Room() / 32 ? 0 : slab_bytes - Room();
  }

 private:
  CacheBudget(uint64_t limit, bool counts_bytes) : limit_(limit), counts_bytes_(counts_bytes) {}
  uint64_t Used() const { return counts_bytes_ ? num_bytes_ : num_rows_; }
  uint64_t Room() const { return std::max(limit_ - std::min(limit_, beside_bytes_), limit_ / 8); }
  uint64_t Target() const { return counts_bytes_ ? Room() - Room() / 16 : limit_; }

  uint64_t limit_ = 0;
  bool counts_bytes_ = false;
  uint64_t num_rows_ = 0;
  uint64_t num_bytes_ = 0;
  uint64_t beside_bytes_ = 0;
};

// The keys of resident rows, so that finding the oldest ones takes no pass over all rows of the
// shard, which may be a hundred times as many.
//
// A key is added when its row becomes resident; ForEach() drops those whose row no longer is.
class HotKeys {
 public:
  // May repeat keys that the list has.
  void Add(uint64_t key) { keys_.push_back(key); }
  // Counts repetitions, and keys whose row is not resident any more.
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

// The rows that recent prefetch hints named. They are demoted after all others, though they were
// not used for long: a lookup is about to need them.
//
// A row is remembered for a number of hints, then forgotten, whether it was used or not. A Bloom
// filter of two generations: some other rows are taken for hinted ones, which keeps them resident
// for a while and does no harm.
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

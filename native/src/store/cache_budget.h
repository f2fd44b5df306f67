// CacheBudget: the rows that a shard of a store with a tier has in memory, and how many it may have
// there: so many rows, or what so many bytes have room for.
//
// Of bytes, all counts that the shard keeps in memory for its rows, the index of those in the pool
// included: what that leaves is for rows in memory, at least an eighth of all. A sixteenth is kept
// for those that a call may leave behind.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace persia::store {

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
  // What is in memory beside these rows.
  void SetBeside(uint64_t num_bytes) { beside_bytes_ = num_bytes; }

  // How many rows are too many. Of bytes, as many as rows of the mean size would be: where smaller
  // ones go, more have to.
  uint64_t Excess() const {
    if (Used() <= Target()) return 0;
    const uint64_t excess = Used() - Target();
    if (!counts_bytes_) return excess;
    const uint64_t mean = std::max<uint64_t>(num_bytes_ / num_rows_, 1);
    return std::min((excess + mean - 1) / mean, num_rows_);
  }
  // Whether it is exceeded by at most a `part`th.
  bool IsWithin(uint64_t part) const { return Used() <= Target() + Target() / part; }
  // Of bytes: what slabs of so many, for the rows in memory, have too many; a little does not
  // matter.
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

}  // namespace persia::store

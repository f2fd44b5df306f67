// CacheBudget: the rows that a shard of a store with a tier has in memory, and how many it may have
// there: so many, or as many as take so many bytes.
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

  uint64_t num_rows() const { return num_rows_; }
  void Add(uint64_t row_bytes) {
    ++num_rows_;
    num_bytes_ += row_bytes;
  }
  void Remove(uint64_t row_bytes) {
    --num_rows_;
    num_bytes_ -= row_bytes;
  }
  void RemoveAll() { num_rows_ = num_bytes_ = 0; }

  // How many rows are too many. Of bytes, as many as rows of the mean size would be: where smaller
  // ones go, more have to.
  uint64_t Excess() const {
    if (Used() <= limit_) return 0;
    const uint64_t excess = Used() - limit_;
    if (!counts_bytes_) return excess;
    const uint64_t mean = std::max<uint64_t>(num_bytes_ / num_rows_, 1);
    return std::min((excess + mean - 1) / mean, num_rows_);
  }
  // Whether it is exceeded by at most a `part`th.
  bool IsWithin(uint64_t part) const { return Used() <= limit_ + limit_ / part; }

 private:
  CacheBudget(uint64_t limit, bool counts_bytes) : limit_(limit), counts_bytes_(counts_bytes) {}
  uint64_t Used() const { return counts_bytes_ ? num_bytes_ : num_rows_; }

  uint64_t limit_ = 0;
  bool counts_bytes_ = false;
  uint64_t num_rows_ = 0;
  uint64_t num_bytes_ = 0;
};

}  // namespace persia::store

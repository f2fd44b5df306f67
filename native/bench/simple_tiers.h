// Two ways to keep rows in a pool that are easier than ours (store/store_tier.h), for tiers_bench.
//
// Both have one index of all rows, a hash map in stripes with a lock each, and train rows by the
// same rules over the same pool. Thread-safe; what fails ends the program.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "pool/row_pool.h"
#include "store/row_policy.h"

namespace persia::bench {

// Of both: what they have of rows of one dim without a scalar.
class SimpleTier {
 public:
  SimpleTier(pool::RowPool& pool, const store::RowPolicy& rules, uint32_t dim);
  virtual ~SimpleTier() = default;

  // Embeddings, row after row; makes the rows that are missing.
  virtual void Lookup(std::span<const uint64_t> signs, float* rows) = 0;
  virtual void Update(std::span<const uint64_t> signs, const float* gradients) = 0;

 protected:
  // Into `values`, which has room for the row.
  void Read(uint64_t sign, uint64_t address, float* values) const;
  // Returns the new address.
  uint64_t Write(uint64_t sign, uint64_t replaces, const float* values);
  void Initialize(uint64_t sign, float* values) const;
  void Step(float* values, const float* gradient) const;
  uint32_t dim() const { return dim_; }
  size_t row_floats() const { return size_t{dim_} + state_floats_; }

 private:
  pool::RowPool& pool_;
  const store::RowPolicy& rules_;
  const uint32_t dim_;
  const uint32_t state_floats_;
};

// By sign; the rows of a stripe are its lock's.
template <typename Row>
class StripedMap {
 public:
  struct Stripe {
    std::mutex mutex;
    std::unordered_map<uint64_t, Row> rows;
  };
  explicit StripedMap(uint64_t num_rows) {
    for (Stripe& stripe : stripes_) stripe.rows.reserve(num_rows / kStripes);
  }
  Stripe& Of(uint64_t sign) { return stripes_[sign * 0x9E3779B97F4A7C15u >> 56]; }

 private:
  static constexpr size_t kStripes = 256;
  std::array<Stripe, kStripes> stripes_;
};

// Every lookup reads its rows from the pool, every update reads and writes them there.
class StraightToTier final : public SimpleTier {
 public:
  StraightToTier(pool::RowPool& pool, const store::RowPolicy& rules, uint32_t dim,
                 uint64_t num_rows);
  void Lookup(std::span<const uint64_t> signs, float* rows) override;
  void Update(std::span<const uint64_t> signs, const float* gradients) override;

 private:
  StripedMap<uint64_t> addresses_;
};

// Read-through and write-back: a row that is used comes into memory and becomes the newest of a
// list under a lock; where there are too many, the caller writes the oldest back if it has changed.
class TextbookCache final : public SimpleTier {
 public:
  TextbookCache(pool::RowPool& pool, const store::RowPolicy& rules, uint32_t dim, uint64_t num_rows,
                uint64_t cache_rows);
  void Lookup(std::span<const uint64_t> signs, float* rows) override;
  void Update(std::span<const uint64_t> signs, const float* gradients) override;

 private:
  struct Row {
    uint64_t sign = 0;
    uint64_t address = pool::kNoAddress;
    std::unique_ptr<float[]> values;  // null: in the pool alone
    bool has_changed = false;
    bool is_listed = false;  // guarded by order_mutex_
    std::list<Row*>::iterator place;
  };
  // With the lock of the row's stripe: it is in memory, and the newest. Returns the row that has to
  // go, or null.
  Row* Use(Row& row, uint64_t sign);
  void Evict(Row* victim);

  const uint64_t cache_rows_;
  StripedMap<Row> rows_;
  std::mutex order_mutex_;  // taken behind a stripe's
  std::list<Row*> order_;   // the newest first
};

}  // namespace persia::bench

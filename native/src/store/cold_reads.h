// ColdReads: rows that are read from the pool while nobody waits for the shard they are of.
//
// Where the shard is locked, rows are added; then it is let go of, and the device is asked for all
// of them at once; locked again, the shard takes what it still has a use for. Meanwhile a row may
// have come into the cache, have changed and have left it again, for the same place in the pool:
// RowMarks tell. What cannot be taken is read as if there had been no ColdReads.
//
// Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pool/row_pool.h"
#include "store/sign_index.h"
#include "store/tier_cells.h"

namespace persia::store {

// Whether rows of a shard were written to the pool: counts, of which several rows have one.
class RowMarks {
 public:
  uint32_t Of(uint64_t key) const { return counts_[PlaceOf(key)]; }
  void NoteWrite(uint64_t key) { ++counts_[PlaceOf(key)]; }

 private:
  static constexpr size_t kCounts = 1024;
  // The low bits of a key choose the shard.
  static size_t PlaceOf(uint64_t key) { return (key >> 32) % kCounts; }
  std::array<uint32_t, kCounts> counts_{};
};

class ColdReads {
 public:
  struct Row {
    uint64_t key;
    uint64_t address;
    uint32_t mark;
    bool is_found;
    pool::RowHead head;
    std::span<const float> values;
  };

  void Clear() {
    rows_.clear();
    num_floats_ = 0;
    next_ = 0;
  }
  bool is_empty() const { return rows_.empty(); }
  void Add(uint64_t key, const ColdCell& cell, uint32_t mark);
  void ReadFrom(const pool::RowPool& pool);
  // The row of the key, or null: not found, or not added. Keys are asked for in the order in which
  // they were added.
  const Row* Find(uint64_t key);

 private:
  struct Added {
    Row row;
    size_t num_floats;
  };
  std::vector<Added> rows_;
  std::vector<float> values_;
  std::vector<pool::RowRead> reads_;
  size_t num_floats_ = 0;
  size_t next_ = 0;
};

}  // namespace persia::store

// Where a store with a tier keeps each of its rows, and reads of cold rows.
//
// A resident row has a HotRow behind its state: the address of its older version in the tier, and
// whether the tier lacks the present one. A cold row is a cell of a ColdShape: eight bytes with its
// address, in slabs whose shape says how large the row is. The cell's dim is 0, which no request
// has: code that looks for resident rows takes a cold one for missing, at no cost to stores without
// a tier.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/status.h"
#include "pool/row_pool.h"
#include "store/row_slabs.h"
#include "store/sign_index.h"

namespace persia::store {

struct HotRow {
  uint64_t address;  // in the pool, or pool::kNoAddress
  uint64_t unsaved;  // the batch that made the values, where the pool does not have them; else 0
};
struct ColdRow {
  uint64_t address;  // all that the cell holds; the others are the slab's to say
  uint32_t dim;
  uint32_t state_floats;
};

// Of a pool, while a shard is kept from other calls: some ten microseconds from memory.
inline constexpr size_t kColdRowsAtATime = 16;

// That are read at once, the shard being open to others where the pool is no mapped memory: more
// are hardly faster (pool_bench).
inline constexpr size_t kAheadAtATime = 128;

inline constexpr uint32_t kHotRowFloats = 4;
static_assert(sizeof(HotRow) == kHotRowFloats * sizeof(float));
inline constexpr uint64_t kColdBytes = sizeof(ColdRow::address);

// The label carries what the cell has no room for: cold rows of one size share slabs.
inline RowShape ColdShape(uint32_t dim, uint32_t state_floats) {
  return {.dim = 0,
          .state_floats = kColdBytes / sizeof(float),
          .label = uint64_t{dim} << 32 | state_floats};
}

// Only where there is a tier: elsewhere no cell has dim 0.
inline bool IsCold(const RowSlabs& slabs, uint32_t cell) { return slabs.dim(cell) == 0; }

// The cell must be cold.
inline ColdRow ColdRowOf(const RowSlabs& slabs, uint32_t cell) {
  const uint64_t label = slabs.shape(cell).label;
  ColdRow cold = {0, static_cast<uint32_t>(label >> 32), static_cast<uint32_t>(label)};
  std::memcpy(&cold.address, slabs.values(cell), sizeof(cold.address));
  return cold;
}
// kNoCell: there is no memory.
[[nodiscard]] inline uint32_t AllocateCold(const ColdRow& cold, RowSlabs* slabs) {
  const RowShape shape = ColdShape(cold.dim, cold.state_floats);
  const uint32_t cell = slabs->Allocate(slabs->FindOrAddPool(shape));
  if (cell != RowSlabs::kNoCell) {
    std::memcpy(slabs->values(cell), &cold.address, sizeof(cold.address));
  }
  return cell;
}
// The cell must be resident, and its shape have kHotRowFloats behind the state.
inline float* HotRowAt(const RowSlabs& slabs, uint32_t cell) {
  const RowShape& shape = slabs.shape(cell);
  return slabs.values(cell) + shape.dim + shape.state_floats;
}
inline HotRow HotRowOf(const RowSlabs& slabs, uint32_t cell) {
  HotRow hot;
  std::memcpy(&hot, HotRowAt(slabs, cell), sizeof(hot));
  return hot;
}
inline void SetHotRow(const RowSlabs& slabs, uint32_t cell, const HotRow& hot) {
  std::memcpy(HotRowAt(slabs, cell), &hot, sizeof(hot));
}

// Reads the row of a cold entry; *values becomes as large as the row. kCorruption: the tier has
// another row there.
inline Status ReadCold(const pool::RowPool& pool, const SignIndex::Entry& entry,
                       const RowSlabs& slabs, pool::RowHead* head, std::vector<float>* values) {
  const ColdRow cold = ColdRowOf(slabs, entry.cell);
  values->resize(size_t{cold.dim} + cold.state_floats);
  return pool.Read(cold.address, SignOfKey(entry.key), head, *values);
}

// Counts writes of a shard's rows to the tier, many rows to a counter. A read that was issued
// without the shard's mutex is current only if its row's counter did not change meanwhile: the row
// may have been promoted, changed and demoted again to the same address.
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

// Reads cold rows of a shard while other calls may use it.
//
// With the shard's mutex held, rows are added; with the mutex released, ReadFrom() asks the device
// for all of them at once; with the mutex held again, the shard takes what RowMarks says is still
// current, and reads the rest as if there had been no ColdReads. Not thread-safe.
class ColdReads {
 public:
  void Clear() {
    reads_.clear();
    added_.clear();
    num_floats_ = 0;
    next_ = 0;
  }
  bool is_empty() const { return reads_.empty(); }
  // `mark` is RowMarks' for the key. With the shard's mutex held.
  void Add(uint64_t key, const ColdRow& cold, uint32_t mark);
  // Without the mutex.
  void ReadFrom(const pool::RowPool& pool);
  // The row of the key as the tier stores it now, by the shard's marks; null: it was not added, not
  // found, or may have been written since. Keys are asked for in the order in which they were
  // added.
  const pool::RowRead* Find(uint64_t key, const RowMarks* marks);

 private:
  struct Added {
    uint64_t key;
    size_t num_floats;
    uint32_t mark;
  };
  std::vector<pool::RowRead> reads_;
  std::vector<Added> added_;  // of reads_, in the same order
  std::vector<float> values_;
  size_t num_floats_ = 0;
  size_t next_ = 0;
};

}  // namespace persia::store

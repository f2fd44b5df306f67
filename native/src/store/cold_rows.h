// Where a store with a tier keeps each of its rows, and reads of cold rows.
//
// A resident row has a cell behind its state: the address of its older version in the tier, and
// whether the tier lacks the present one. A cold row is a slot of a ColdShape: eight bytes with its
// address, in slabs whose shape says how large the row is. The slot's dim is 0, which no request
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

struct HotCell {
  uint64_t address;  // in the pool, or pool::kNoAddress
  uint64_t unsaved;  // the batch that made the values, where the pool does not have them; else 0
};
struct ColdCell {
  uint64_t address;  // the cell itself; the others are the slab's to say
  uint32_t dim;
  uint32_t state_floats;
};

// Of a pool, while a shard is kept from other calls: some ten microseconds from memory.
inline constexpr size_t kColdRowsAtATime = 16;

// That are read at once, the shard being open to others where the pool is no mapped memory: more
// are hardly faster (pool_bench).
inline constexpr size_t kAheadAtATime = 128;

inline constexpr uint32_t kCellFloats = 4;
static_assert(sizeof(HotCell) == kCellFloats * sizeof(float));
inline constexpr uint64_t kColdBytes = sizeof(ColdCell::address);

// The label carries what the cell has no room for: cold rows of one size share slabs.
inline RowShape ColdShape(uint32_t dim, uint32_t state_floats) {
  return {.dim = 0,
          .state_floats = kColdBytes / sizeof(float),
          .label = uint64_t{dim} << 32 | state_floats};
}

// Only where there is a tier: elsewhere no slot has dim 0.
inline bool IsCold(const RowSlabs& slabs, uint32_t slot) { return slabs.dim(slot) == 0; }

// The slot must be cold.
inline ColdCell ColdCellOf(const RowSlabs& slabs, uint32_t slot) {
  const uint64_t label = slabs.shape(slot).label;
  ColdCell cell = {0, static_cast<uint32_t>(label >> 32), static_cast<uint32_t>(label)};
  std::memcpy(&cell.address, slabs.values(slot), sizeof(cell.address));
  return cell;
}
// kNoSlot: there is no memory.
[[nodiscard]] inline uint32_t AllocateCold(const ColdCell& cell, RowSlabs* slabs) {
  const RowShape shape = ColdShape(cell.dim, cell.state_floats);
  const uint32_t slot = slabs->Allocate(slabs->FindOrAddPool(shape));
  if (slot != RowSlabs::kNoSlot) {
    std::memcpy(slabs->values(slot), &cell.address, sizeof(cell.address));
  }
  return slot;
}
// The slot must be resident, and its shape have kCellFloats behind the state.
inline float* HotCellAt(const RowSlabs& slabs, uint32_t slot) {
  const RowShape& shape = slabs.shape(slot);
  return slabs.values(slot) + shape.dim + shape.state_floats;
}
inline HotCell HotCellOf(const RowSlabs& slabs, uint32_t slot) {
  HotCell cell;
  std::memcpy(&cell, HotCellAt(slabs, slot), sizeof(cell));
  return cell;
}
inline void SetCell(const RowSlabs& slabs, uint32_t slot, const HotCell& cell) {
  std::memcpy(HotCellAt(slabs, slot), &cell, sizeof(cell));
}

// Reads the row of a cold entry; *values becomes as large as the row. kCorruption: the tier has
// another row there.
inline Status ReadCold(const pool::RowPool& pool, const SignIndex::Entry& entry,
                       const RowSlabs& slabs, pool::RowHead* head, std::vector<float>* values) {
  const ColdCell cell = ColdCellOf(slabs, entry.slot);
  values->resize(size_t{cell.dim} + cell.state_floats);
  return pool.Read(cell.address, SignOfKey(entry.key), head, *values);
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
  void Add(uint64_t key, const ColdCell& cell, uint32_t mark);
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

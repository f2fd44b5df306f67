// What a store with a tier keeps of each row beside its values (tier.h).
//
// A row in the cache has a cell behind its state: where its older version is in the pool, and
// whether the pool lacks the present one. A row that is in the pool alone is a slot of a ColdShape:
// a cell that says where it is, in slabs that say how large. Its dim is 0, which no row that is
// asked for has: what looks for rows in memory takes it for one that is missing, at no cost to
// stores without a tier.
#pragma once

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

inline RowShape ColdShape(uint32_t dim, uint32_t state_floats) {
  return {.dim = 0,
          .state_floats = kColdBytes / sizeof(float),
          .label = uint64_t{dim} << 32 | state_floats};
}

inline bool IsCold(const RowSlabs& slabs, uint32_t slot) { return slabs.dim(slot) == 0; }

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

// The row of a cold entry; *values becomes as large as the row.
inline Status ReadCold(const pool::RowPool& pool, const SignIndex::Entry& entry,
                       const RowSlabs& slabs, pool::RowHead* head, std::vector<float>* values) {
  const ColdCell cell = ColdCellOf(slabs, entry.slot);
  values->resize(size_t{cell.dim} + cell.state_floats);
  return pool.Read(cell.address, SignOfKey(entry.key), head, *values);
}

}  // namespace persia::store

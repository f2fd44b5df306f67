// LruList: the order of eviction, a doubly linked list of slots through RowMeta.
//
// Considered against it: a last-touch number a row with an append-only log of touches,
// compacted now and then. The log writes sequentially, but compaction reads the
// metadata of every row at random once per as many touches, so it saves little, needs
// 8 to 16 bytes a row against 8, and pauses. The list's cost is the two neighbours of
// a touched row; their addresses are known a stage earlier, so the caller prefetches
// them (shard.cc), and under skewed traffic the neighbours of hot rows are hot.
//
// Not thread-safe.
#pragma once

#include <cstdint>

#include "store/row_slabs.h"

namespace persia::store {

class LruList {
 public:
  explicit LruList(RowSlabs& slabs) : slabs_(slabs) {}
  LruList(const LruList&) = delete;
  LruList& operator=(const LruList&) = delete;

  uint32_t oldest() const { return oldest_; }  // kNoSlot when empty

  // The slot must not be in the list.
  void AddNewest(uint32_t slot) {
    RowMeta& row = slabs_.meta(slot);
    row.newer = RowSlabs::kNoSlot;
    row.older = newest_;
    (newest_ == RowSlabs::kNoSlot ? oldest_ : slabs_.meta(newest_).newer) = slot;
    newest_ = slot;
  }
  // The slot must be in the list.
  void Remove(uint32_t slot) {
    const RowMeta& row = slabs_.meta(slot);
    (row.newer == RowSlabs::kNoSlot ? newest_ : slabs_.meta(row.newer).older) = row.older;
    (row.older == RowSlabs::kNoSlot ? oldest_ : slabs_.meta(row.older).newer) = row.newer;
  }
  void MakeNewest(uint32_t slot) {
    if (slot == newest_) return;
    Remove(slot);
    AddNewest(slot);
  }
  void PrefetchNeighbours(uint32_t slot) const {
    const RowMeta& row = slabs_.meta(slot);
    if (row.newer < RowSlabs::kFreeMark) __builtin_prefetch(&slabs_.meta(row.newer), 1);
    if (row.older != RowSlabs::kNoSlot) __builtin_prefetch(&slabs_.meta(row.older), 1);
  }
  void Clear() { newest_ = oldest_ = RowSlabs::kNoSlot; }

 private:
  RowSlabs& slabs_;
  uint32_t newest_ = RowSlabs::kNoSlot;
  uint32_t oldest_ = RowSlabs::kNoSlot;
};

}  // namespace persia::store

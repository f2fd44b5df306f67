// ProbeInBlocks and Touch: find the rows of many signs with their cache misses overlapped.
//
// A prefetch instruction is only a hint: where the address has to be looked up in the page tables
// first, which in a virtual machine is most of the cost of a random access, processors may drop it.
// A read is never dropped. Reads that do not depend on one another overlap all the same, so
// touching the memory of some tens of rows in a loop of its own, and working on them in the next,
// takes little longer than the slowest of them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "store/sign_index.h"

namespace persia::store {

// Brings memory into the processor's cache by reading it.
inline void Touch(const void* address) {
  static_cast<void>(*static_cast<const volatile unsigned char*>(address));
}

// Memory that other threads may be writing. `volatile`: an unused read is kept.
template <typename T>
void Touch(const std::atomic<T>& cell) {
  const volatile std::atomic<T>& read = cell;
  static_cast<void>(read.load(std::memory_order_relaxed));
}

// Each cache line of `floats` up to a point, from where the processor follows by itself.
inline void TouchRow(const float* row, size_t floats) {
  constexpr size_t kLineFloats = 16, kMaxFloats = 256;
  for (size_t i = 0; i < floats && i < kMaxFloats; i += kLineFloats) Touch(row + i);
}

// A sign costs a miss in the index, then misses in the row that the entry leads to. Signs pass
// through each stage many at a time. The loops that miss do nothing but read, so that as many reads
// as the processor can have are under way at once.
//
// For each i below `count`, in order: place(i) returns the key and the index it is in, row(i,
// entry) returns what use() will read first, `row_floats` of them, or null where nothing will be
// read. Then use(i, entry, row); the entry is null where there is none, and then so is the row.
// None of them may insert or remove.
template <typename Place, typename Row, typename Use>
void ProbeInBlocks(size_t count, size_t row_floats, Place place, Row row, Use use) {
  using Entry = SignIndex::Entry;
  constexpr size_t kBlock = 256;
  std::array<uint64_t, kBlock> keys;
  std::array<Entry*, kBlock> entries;  // at first, how far the search has come
  std::array<const float*, kBlock> rows;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    for (size_t i = 0; i < size; ++i) {
      const auto [key, index] = place(begin + i);
      keys[i] = key;
      entries[i] = index->HomeOf(key);
    }
    for (size_t i = 0; i < size; ++i) Touch(entries[i]);
    for (size_t i = 0; i < size; ++i) {
      entries[i] = SignIndex::SkipHome(entries[i], keys[i]);
      Touch(entries[i]);
    }
    for (size_t i = 0; i < size; ++i) {
      entries[i] = SignIndex::FindFrom(entries[i], keys[i]);
      rows[i] = entries[i] == nullptr ? nullptr : row(begin + i, entries[i]);
    }
    for (size_t i = 0; i < size; ++i) {
      if (rows[i] != nullptr) TouchRow(rows[i], row_floats);
    }
    for (size_t i = 0; i < size; ++i) use(begin + i, entries[i], rows[i]);
  }
}

}  // namespace persia::store

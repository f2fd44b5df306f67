// ProbeInBlocks and Touch: find the rows of many signs with their cache misses overlapped.
//
// ProbeInBlocks asks for memory by prefetch instructions, which do not wait for it. They are hints:
// where the address has to be looked up in the page tables first, some processors drop them, and
// the stage that needs the memory waits for what is left.
//
// Touch() reads, which is never dropped. Reads that do not depend on one another overlap, so
// touching the memory of some tens of rows in a loop of its own, and working on them in the next,
// takes little longer than the slowest of them. It serves where there is no stage of other work to
// hide the misses behind.
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
// through a pipeline, a block at a time: while one block's index lines are on their way, the
// entries of the block before it are found, and the rows of the one before that are used. So the
// misses of two blocks are always under way, and work hides them.
//
// For each i below `count`, in order: place(i) returns the key and the index it is in, row(i,
// entry) returns what use() will read first, `row_floats` of them, or null where nothing will be
// read. Then use(i, entry, row); the entry is null where there is none, and then so is the row.
// place() and row() are called up to three blocks ahead of use(). None of them may insert or
// remove.
template <typename Place, typename Row, typename Use>
void ProbeInBlocks(size_t count, size_t row_floats, Place place, Row row, Use use) {
  using Entry = SignIndex::Entry;
  constexpr size_t kBlock = 64, kStages = 4;
  struct Block {
    std::array<uint64_t, kBlock> keys;
    std::array<Entry*, kBlock> entries;  // at first, how far the search has come
    std::array<const float*, kBlock> rows;
  };
  std::array<Block, kStages> blocks;
  const size_t num_blocks = (count + kBlock - 1) / kBlock;
  // A stage's turn: block number `n`, if there is one, and what the stage does with its i-th sign.
  const auto run = [&](size_t n, auto stage) {
    if (n >= num_blocks) return;  // also of a stage that the first block has not reached
    Block& block = blocks[n % kStages];
    const size_t begin = n * kBlock, size = std::min(kBlock, count - begin);
    for (size_t i = 0; i < size; ++i) stage(block, i, begin + i);
  };
  for (size_t step = 0; step < num_blocks + kStages - 1; ++step) {
    run(step, [&](Block& block, size_t i, size_t number) {
      const auto [key, index] = place(number);
      block.keys[i] = key;
      block.entries[i] = index->HomeOf(key);
      __builtin_prefetch(block.entries[i]);
    });
    run(step - 1, [&](Block& block, size_t i, size_t) {
      block.entries[i] = SignIndex::SkipHome(block.entries[i], block.keys[i]);
      __builtin_prefetch(block.entries[i]);
    });
    run(step - 2, [&](Block& block, size_t i, size_t number) {
      block.entries[i] = SignIndex::FindFrom(block.entries[i], block.keys[i]);
      block.rows[i] = block.entries[i] == nullptr ? nullptr : row(number, block.entries[i]);
      if (block.rows[i] == nullptr) return;
      for (size_t j = 0; j < row_floats && j < 256; j += 16) __builtin_prefetch(block.rows[i] + j);
    });
    run(step - 3, [&](Block& block, size_t i, size_t number) {
      use(number, block.entries[i], block.rows[i]);
    });
  }
}

}  // namespace persia::store

// UniqueKeys: numbers 64-bit keys in the order of their first appearance.
//
// The deduplication of a batch. The table holds numbers alone, four bytes each, and the keys lie in
// an array by number: for the thousands of keys of a slot's batch both stay in the nearest cache.
// The table grows with the distinct keys, not with the keys, and is used again from batch to batch.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace persia::worker {

// Open addressing with linear probing, at most half full. A key is compared in keys_, by the number
// in its place, so that a place takes 4 bytes instead of 12.
class UniqueKeys {
 public:
  UniqueKeys() { Clear(); }

  // Forgets all keys; keeps the memory. The table need not grow for as many as are expected.
  void Clear(size_t num_expected = 0);

  // numbers[i] becomes the number of keys[i]. `numbers` holds keys.size() elements.
  // Numbers continue those of earlier calls since Clear(). Keys are at most 2^32 - 1 in all.
  void Insert(std::span<const uint64_t> keys, uint32_t* numbers);

  // By number.
  std::span<const uint64_t> keys() const { return std::span(keys_).subspan(1); }

 private:
  uint32_t Number(uint64_t key);
  // An empty table of this capacity, with the keys that there are.
  void Rebuild(size_t capacity);
  // Fibonacci hashing: signs of one group differ in their low bits, often by one.
  size_t Home(uint64_t key) const {
    return static_cast<size_t>(((key ^ (key >> 32)) * 0x9e3779b97f4a7c15ULL) >> shift_);
  }

  std::vector<uint32_t> places_;  // 1 + number; 0 where there is none
  size_t capacity_ = 0;           // a power of two; the part of places_ that is in use
  uint32_t shift_ = 64;
  std::vector<uint64_t> keys_;  // by 1 + number; the first is none
};

}  // namespace persia::worker

// UniqueKeys: numbers 64-bit keys in the order of their first appearance.
//
// The deduplication of a batch. One open-addressing table is reused from batch to batch: entries of
// former uses are told apart by their generation, so that a small set of keys pays neither for
// clearing nor for the cache misses of the largest set before it. Grows with the distinct keys, not
// with the keys. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace persia::worker {

class UniqueKeys {
 public:
  UniqueKeys() { Clear(); }

  // Forgets all keys; keeps the memory.
  void Clear();

  // numbers[i] becomes the number of keys[i]. `numbers` holds keys.size() elements.
  void Insert(std::span<const uint64_t> keys, uint32_t* numbers);

  // By number.
  std::span<const uint64_t> keys() const { return keys_; }

 private:
  struct Entry {
    uint64_t key = 0;
    uint32_t generation = 0;  // in use when it is the table's
    uint32_t number = 0;
  };

  void SetCapacity(size_t capacity);
  size_t Home(uint64_t key) const;
  uint32_t FindOrAdd(uint64_t key);
  void Grow();
  void Place(uint64_t key, uint32_t number);

  std::vector<Entry> entries_;
  size_t capacity_ = 0;  // a power of two; the part of entries_ that is in use
  uint32_t shift_ = 64;
  uint32_t generation_ = 0;
  std::vector<uint64_t> keys_;
};

}  // namespace persia::worker

#include "worker/unique_keys.h"

#include <algorithm>
#include <bit>

namespace persia::worker {
namespace {

constexpr size_t kInitialCapacity = 1024;
constexpr size_t kPrefetchAhead = 8;

}  // namespace

void UniqueKeys::Clear() {
  keys_.clear();
  SetCapacity(kInitialCapacity);
}

// An empty table of this capacity: what lies in the entries belongs to an older generation.
void UniqueKeys::SetCapacity(size_t capacity) {
  capacity_ = capacity;
  shift_ = 64 - std::countr_zero(capacity);
  if (entries_.size() < capacity) entries_.resize(capacity);
  if (++generation_ == 0) {  // wrapped: the oldest entries would look new
    std::fill(entries_.begin(), entries_.end(), Entry{});
    generation_ = 1;
  }
}

// Fibonacci hashing: signs of one group differ in their low bits, often by one.
size_t UniqueKeys::Home(uint64_t key) const {
  return static_cast<size_t>(((key ^ (key >> 32)) * 0x9e3779b97f4a7c15ULL) >> shift_);
}

void UniqueKeys::Insert(std::span<const uint64_t> keys, uint32_t* numbers) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kPrefetchAhead < keys.size()) {
      __builtin_prefetch(&entries_[Home(keys[i + kPrefetchAhead])]);
    }
    numbers[i] = FindOrAdd(keys[i]);
  }
}

uint32_t UniqueKeys::FindOrAdd(uint64_t key) {
  size_t position = Home(key);
  while (entries_[position].generation == generation_) {
    if (entries_[position].key == key) return entries_[position].number;
    position = (position + 1) & (capacity_ - 1);
  }
  const auto number = static_cast<uint32_t>(keys_.size());
  entries_[position] = {key, generation_, number};
  keys_.push_back(key);
  if (keys_.size() * 2 > capacity_) Grow();
  return number;
}

void UniqueKeys::Grow() {
  SetCapacity(capacity_ * 4);
  for (uint32_t number = 0; number < keys_.size(); ++number) Place(keys_[number], number);
}

void UniqueKeys::Place(uint64_t key, uint32_t number) {
  size_t position = Home(key);
  while (entries_[position].generation == generation_) position = (position + 1) & (capacity_ - 1);
  entries_[position] = {key, generation_, number};
}

}  // namespace persia::worker

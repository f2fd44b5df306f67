#include "worker/unique_keys.h"

#include <algorithm>
#include <array>
#include <bit>

namespace persia::worker {
namespace {

// 16 KiB, half of a common first-level cache, for up to 2,048 keys.
constexpr size_t kInitialCapacity = 4096;

}  // namespace

void UniqueKeys::Clear(size_t num_expected) {
  keys_.assign(1, 0);
  Rebuild(std::max(kInitialCapacity, std::bit_ceil(2 * (num_expected + 1))));
}

void UniqueKeys::Rebuild(size_t capacity) {
  capacity_ = capacity;
  shift_ = 64 - std::countr_zero(capacity);
  if (places_.size() < capacity) places_.resize(capacity);
  std::fill_n(places_.begin(), capacity, 0);
  for (uint32_t i = 1; i < keys_.size(); ++i) {
    size_t place = Home(keys_[i]);
    while (places_[place] != 0) place = (place + 1) & (capacity_ - 1);
    places_[place] = i;
  }
}

// Linear probing in a table that is at most half full. The key is compared through its number, so a
// place takes 4 bytes instead of 12.
//
// Whether a key is new cannot be predicted, and each wrong guess would cost as much as some keys.
// So a first pass over a block looks at the homes alone, without a branch. It leaves keys that
// are not at home. Most of these are new.
void UniqueKeys::Insert(std::span<const uint64_t> keys, uint32_t* numbers) {
  constexpr size_t kBlock = 256;
  std::array<uint32_t, kBlock> left;
  for (size_t begin = 0; begin < keys.size(); begin += kBlock) {
    const size_t size = std::min(kBlock, keys.size() - begin);
    size_t count = 0;
    for (size_t i = 0; i < size; ++i) {
      const uint32_t found = places_[Home(keys[begin + i])];
      numbers[begin + i] = found - 1;
      left[count] = static_cast<uint32_t>(i);
      count += static_cast<size_t>((found == 0) | (keys_[found] != keys[begin + i]));
    }
    for (size_t i = 0; i < count; ++i) numbers[begin + left[i]] = Number(keys[begin + left[i]]);
  }
}

uint32_t UniqueKeys::Number(uint64_t key) {
  size_t place = Home(key);
  while (places_[place] != 0 && keys_[places_[place]] != key) {
    place = (place + 1) & (capacity_ - 1);
  }
  if (places_[place] != 0) return places_[place] - 1;
  places_[place] = static_cast<uint32_t>(keys_.size());
  keys_.push_back(key);
  const auto number = static_cast<uint32_t>(keys_.size() - 2);
  // At most half full: probes stay short, and an empty place is always found.
  if (keys_.size() * 2 > capacity_) Rebuild(capacity_ * 2);
  return number;
}

}  // namespace persia::worker

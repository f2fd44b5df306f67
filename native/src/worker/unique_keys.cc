#include "worker/unique_keys.h"

#include <algorithm>
#include <bit>

namespace persia::worker {
namespace {

// 16 KiB, half of a common first-level cache, for up to 2,048 keys.
constexpr size_t kInitialCapacity = 4096;

}  // namespace

void UniqueKeys::Clear() {
  keys_.clear();
  Rebuild(kInitialCapacity);
}

void UniqueKeys::Rebuild(size_t capacity) {
  capacity_ = capacity;
  shift_ = 64 - std::countr_zero(capacity);
  if (places_.size() < capacity) places_.resize(capacity);
  std::fill_n(places_.begin(), capacity, 0);
  for (uint32_t number = 0; number < keys_.size(); ++number) {
    size_t place = Home(keys_[number]);
    while (places_[place] != 0) place = (place + 1) & (capacity_ - 1);
    places_[place] = number + 1;
  }
}

// Linear probing in a table that is at most half full. The key is compared through its number, so a
// place takes 4 bytes instead of 12.
void UniqueKeys::Insert(std::span<const uint64_t> keys, uint32_t* numbers) {
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t key = keys[i];
    size_t place = Home(key);
    uint32_t found = places_[place];
    while (found != 0 && keys_[found - 1] != key) {
      place = (place + 1) & (capacity_ - 1);
      found = places_[place];
    }
    if (found == 0) {
      keys_.push_back(key);
      found = static_cast<uint32_t>(keys_.size());
      places_[place] = found;
      // At most half full: probes stay short, and an empty place is always found.
      if (keys_.size() * 2 > capacity_) Rebuild(capacity_ * 2);
    }
    numbers[i] = found - 1;
  }
}

}  // namespace persia::worker

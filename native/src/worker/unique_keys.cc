#include "worker/unique_keys.h"

#include <algorithm>
#include <bit>

namespace persia::worker {
namespace {

constexpr size_t kInitialCapacity = 4096;
constexpr size_t kMinRoom = 256;  // less is not worth a turn of InsertSome()

}  // namespace

void UniqueKeys::Clear() {
  size_ = 0;
  Rebuild(kInitialCapacity);
}

void UniqueKeys::Rebuild(size_t capacity) {
  capacity_ = capacity;
  shift_ = 64 - std::countr_zero(capacity);
  if (places_.size() < capacity) places_.resize(capacity);
  std::fill_n(places_.begin(), capacity, 0);
  // One more than there is room for: where the next key would be is written to.
  if (keys_.size() < capacity / 2 + 2) keys_.resize(capacity / 2 + 2);
  for (uint32_t found = 1; found <= size_; ++found) {
    size_t place = Home(keys_[found], shift_);
    while (places_[place] != 0) place = (place + 1) & (capacity_ - 1);
    places_[place] = found;
  }
}

void UniqueKeys::Insert(std::span<const uint64_t> keys, uint32_t* numbers) {
  while (!keys.empty()) {
    if (Room() < kMinRoom) Rebuild(capacity_ * 2);
    const size_t count = std::min(keys.size(), Room());
    InsertSome(keys.first(count), numbers);
    keys = keys.subspan(count);
    numbers += count;
  }
}

// Whether a key is new is as good as random, so no branch asks: where the search ends, at the key
// or at a place without one, there is a key that is equal, for keys_[0] is the one searched for.
// What is written is written in both cases.
void UniqueKeys::InsertSome(std::span<const uint64_t> keys, uint32_t* numbers) {
  uint32_t* const places = places_.data();
  uint64_t* const known = keys_.data();
  const size_t mask = capacity_ - 1;
  const uint32_t shift = shift_;
  auto size = static_cast<uint32_t>(size_);
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t key = keys[i];
    known[0] = key;
    size_t place = Home(key, shift);
    while (known[places[place]] != key) place = (place + 1) & mask;
    const uint32_t next = size + 1;
    const uint32_t found = places[place] == 0 ? next : places[place];
    known[next] = key;
    places[place] = found;
    size += static_cast<uint32_t>(found == next);
    numbers[i] = found - 1;
  }
  size_ = size;
}

}  // namespace persia::worker

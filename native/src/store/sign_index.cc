#include "store/sign_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace persia::store {
namespace {

constexpr uint64_t kEntriesPerPage = MappedMemory::kPageBytes / sizeof(uint64_t);
constexpr uint64_t kTail = 64;

uint64_t EntryOf(uint32_t tag, uint32_t slot) { return uint64_t{tag} << 32 | slot; }

}  // namespace

bool SignIndex::Insert(uint32_t tag, uint32_t slot) {
  if ((size_ + 1) * 5 > home_count_ * 4 && !Grow()) return false;
  const uint64_t entry = EntryOf(tag, slot);
  uint64_t position = Home(tag);
  while (entries_[position] < entry) ++position;
  uint64_t end = position;
  while (entries_[end] != kEmpty) ++end;
  if (end + 1 == length_) {
    // The last homes overflow: signs whose hashes are all near the top. A longer tail takes them.
    return Rebuild(home_count_, 2 * (length_ - home_count_)) && Insert(tag, slot);
  }
  std::memmove(entries_ + position + 1, entries_ + position, (end - position) * sizeof(uint64_t));
  entries_[position] = entry;
  ++size_;
  return true;
}

void SignIndex::Erase(uint32_t tag, uint32_t slot) {
  const uint64_t entry = EntryOf(tag, slot);
  uint64_t position = Home(tag);
  while (entries_[position] != entry) ++position;
  // Followers move back until one that is at home, or
  // a gap: homes ascend, so all behind it may stay.
  uint64_t end = position + 1;
  while (entries_[end] != kEmpty && Home(static_cast<uint32_t>(entries_[end] >> 32)) < end) ++end;
  std::memmove(entries_ + position, entries_ + position + 1,
               (end - position - 1) * sizeof(uint64_t));
  entries_[end - 1] = kEmpty;
  --size_;
}

void SignIndex::Clear() { *this = SignIndex(); }

bool SignIndex::Grow() {
  const uint64_t tail = std::max(kTail, length_ - home_count_);
  return Rebuild(home_count_ + home_count_ / 4 + 1, tail);
}

bool SignIndex::Rebuild(uint64_t home_count, uint64_t tail) {
  const uint64_t pages = (home_count + tail + kEntriesPerPage - 1) / kEntriesPerPage;
  MappedMemory memory = MappedMemory::Allocate(pages * MappedMemory::kPageBytes);
  if (memory.data() == nullptr) return false;
  auto* entries = reinterpret_cast<uint64_t*>(memory.data());
  const uint64_t length = pages * kEntriesPerPage;
  std::fill_n(entries, length, kEmpty);
  const uint64_t old_home_count = std::exchange(home_count_, length - tail);
  uint64_t next = 0;
  for (uint64_t i = 0; i < length_; ++i) {
    if (entries_[i] == kEmpty) continue;
    next = std::max(next, Home(static_cast<uint32_t>(entries_[i] >> 32)));
    if (next + 1 >= length) {
      home_count_ = old_home_count;
      return Rebuild(home_count, 2 * tail);
    }
    entries[next++] = entries_[i];
  }
  memory_ = std::move(memory);
  entries_ = entries;
  length_ = length;
  return true;
}

}  // namespace persia::store

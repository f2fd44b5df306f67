#include "store/sign_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace persia::store {
namespace {

constexpr uint64_t kEntriesPerPage = MappedMemory::kPageBytes / sizeof(SignIndex::Entry);
// Entries behind the last homes. Enough for nearly all indexes: homes are hashes.
constexpr uint64_t kTail = 64;
// Where phases set in: there are pages enough to tell them apart.
constexpr uint64_t kManyHomes = 16'384;

}  // namespace

bool SignIndex::Insert(const Entry& entry) {
  if ((size_ + 1) * 5 > home_count_ * 4 && !Grow()) return false;
  uint64_t position = Home(entry.key);
  while (entries_[position].key < entry.key) ++position;
  // Everything up to the next gap moves by one: a few entries, as the table is at most 4/5 full.
  uint64_t end = position;
  while (entries_[end].cell != kNoCell) ++end;
  if (end + 1 == length_) {
    // The last homes overflow: signs whose keys are all near the top. A longer tail takes them.
    return Rebuild(home_count_, 2 * (length_ - home_count_)) && Insert(entry);
  }
  std::memmove(entries_ + position + 1, entries_ + position, (end - position) * sizeof(Entry));
  entries_[position] = entry;
  ++size_;
  return true;
}

// A size of its own series: an index that is reserved grows as if it had grown step by step.
void SignIndex::Reserve(uint64_t num_entries) {
  const uint64_t home_count = RoundUpToSeries(num_entries + num_entries / 4 + 1);
  if (home_count > home_count_) Rebuild(home_count, std::max(kTail, length_ - home_count_));
}

void SignIndex::Erase(Entry* entry) {
  const auto position = static_cast<uint64_t>(entry - entries_);
  // Followers move back until one that is at home, or
  // a gap: homes ascend, so all behind it may stay.
  uint64_t end = position + 1;
  while (entries_[end].cell != kNoCell && Home(entries_[end].key) < end) ++end;
  std::memmove(entries_ + position, entries_ + position + 1, (end - position - 1) * sizeof(Entry));
  entries_[end - 1] = kEmpty;
  --size_;
}

void SignIndex::Clear(std::shared_ptr<RowArrays> arrays) {
  *this = SignIndex(growth_phase_);
  num_array_cells_ = arrays == nullptr ? 0 : arrays->num_cells();
  arrays_ = std::move(arrays);
}

// In the order of keys, IdStates are spread over the arrays: they are asked for ahead.
void SignIndex::RefreshAll() const {
  if (num_array_cells_ == 0) return;
  constexpr uint64_t kAhead = 32;
  for (uint64_t i = 0; i < length_; ++i) {
    const Entry& later = entries_[std::min(i + kAhead, length_ - 1)];
    if (IsInArray(later)) __builtin_prefetch(&arrays_->IdStateOf(later.cell));
    Refresh(entries_ + i);
  }
}

bool SignIndex::Grow() {
  const uint64_t tail = std::max(kTail, length_ - home_count_);
  return Rebuild(NextHomeCount(), tail);
}

// By a quarter. Where phases set in, it jumps to the first size of its own series.
uint64_t SignIndex::NextHomeCount() const {
  const uint64_t next = home_count_ + home_count_ / 4 + 1;
  if (home_count_ >= kManyHomes || next < kManyHomes) return next;
  return FirstOfSeries();
}

uint64_t SignIndex::FirstOfSeries() const {
  return kManyHomes + static_cast<uint64_t>(kManyHomes / 4 * growth_phase_);
}

uint64_t SignIndex::RoundUpToSeries(uint64_t home_count) const {
  if (home_count < kManyHomes) return home_count;
  uint64_t rounded = FirstOfSeries();
  while (rounded < home_count) rounded += rounded / 4 + 1;
  return rounded;
}

// Old entries stay until the new table is whole: for that long both take memory.
bool SignIndex::Rebuild(uint64_t home_count, uint64_t tail) {
  const uint64_t pages = (home_count + tail + kEntriesPerPage - 1) / kEntriesPerPage;
  MappedMemory memory = MappedMemory::Allocate(pages * MappedMemory::kPageBytes);
  if (memory.data() == nullptr) return false;
  auto* entries = reinterpret_cast<Entry*>(memory.data());
  const uint64_t length = pages * kEntriesPerPage;
  const uint64_t old_home_count = std::exchange(home_count_, length - tail);
  // Entries and the gaps between them are written in one go from front to back.
  uint64_t next = 0;
  for (uint64_t i = 0; i < length_; ++i) {
    if (entries_[i].cell == kNoCell) continue;
    const uint64_t place = std::max(next, Home(entries_[i].key));
    if (place + 1 >= length) {
      home_count_ = old_home_count;
      return Rebuild(home_count, 2 * tail);
    }
    std::fill(entries + next, entries + place, kEmpty);
    entries[place] = entries_[i];
    next = place + 1;
  }
  std::fill(entries + next, entries + length, kEmpty);
  memory_ = std::move(memory);
  entries_ = entries;
  length_ = length;
  return true;
}

}  // namespace persia::store

#include "client/held_rows.h"

#include <algorithm>
#include <vector>

#include "store/probe_in_blocks.h"
#include "store/whole_rows.h"

namespace persia::client {

using store::SignIndex;
using store::SignKey;

namespace {

constexpr uint64_t kEntryBytes = 24;  // of the index, at its usual load
constexpr uint64_t kMinVisits = 4096;
constexpr uint64_t kOldShare = 8;       // one row in so many is older than the cutoff
constexpr uint64_t kVisitsPerRow = 16;  // for each row inserted: finds two that are
constexpr int kMaxWalks = 16;           // through the whole index

}  // namespace

// Batches that stop being recent add their rows to the older ones.
void HeldRows::AdvanceTo(uint64_t batch) {
  if (batch <= newest_) return;
  const uint64_t first = std::max(newest_ + 1, batch < kRecent ? 0 : batch - kRecent + 1);
  if (first > newest_ + 1) {
    for (uint64_t& count : num_used_) num_older_ += std::exchange(count, 0);
  }
  for (uint64_t number = first; number <= batch; ++number) {
    num_older_ += std::exchange(num_used_[number % kRecent], 0);
  }
  newest_ = batch;
}

// A stamp of 2^32 batches ago counts as a recent one, which makes the eviction less precise.
void HeldRows::Count(uint32_t stamp, int64_t change) {
  const uint64_t age = static_cast<uint32_t>(newest_) - stamp;
  uint64_t& count = static_cast<uint32_t>(age) < kRecent ? num_used_[stamp % kRecent] : num_older_;
  count += static_cast<uint64_t>(change);
}

// A batch whose answer is late must not make a row older.
void HeldRows::Touch(SignIndex::Entry* entry, uint64_t batch) {
  const auto stamp = static_cast<uint32_t>(batch);
  if (static_cast<int32_t>(stamp - entry->stamp) <= 0) return;
  Count(entry->stamp, -1);
  Count(stamp, 1);
  entry->stamp = stamp;
}

uint64_t HeldRows::Use(std::span<const uint64_t> signs, uint64_t batch, std::span<uint32_t> cells) {
  AdvanceTo(batch);
  uint64_t num_held = 0;
  store::ProbeInBlocks(
      signs.size(), 0, [&](size_t i) { return std::pair(SignKey(signs[i]), &index_); },
      [](size_t, const SignIndex::Entry*) -> const float* { return nullptr; },
      [&](size_t i, SignIndex::Entry* entry, const float*) {
        cells[i] = entry == nullptr ? kNoCell : entry->cell;
        if (entry == nullptr) return;
        Touch(entry, batch);
        ++num_held;
      });
  return num_held;
}

StatusOr<HeldRows::Inserted> HeldRows::Insert(uint64_t sign, const store::RowShape& shape,
                                              const float* floats, uint64_t batch) {
  const uint64_t key = SignKey(sign);
  if (SignIndex::Entry* entry = index_.Find(key)) {
    Touch(entry, batch);
    return Inserted{entry->cell, false};
  }
  const uint32_t cell = slabs_.Allocate(slabs_.FindOrAddPool(shape));
  const auto stamp = static_cast<uint32_t>(batch);
  if (cell == kNoCell || !index_.Insert({key, cell, stamp})) {
    if (cell != kNoCell) slabs_.Free(cell);
    return ResourceExhausted("there is no memory for the rows of the batches in flight");
  }
  store::SetWholeRow(floats, shape, slabs_.View(cell));
  AdvanceTo(batch);
  Count(stamp, 1);
  num_bytes_ += slabs_.row_bytes(cell) + kEntryBytes;
  ++num_inserted_;
  return Inserted{cell, true};
}

void HeldRows::Remove(SignIndex::Entry* entry) {
  Count(entry->stamp, -1);
  num_bytes_ -= slabs_.row_bytes(entry->cell) + kEntryBytes;
  slabs_.Free(entry->cell);
  index_.Erase(entry);
}

void HeldRows::Drop(uint64_t sign) {
  if (SignIndex::Entry* entry = index_.Find(SignKey(sign))) Remove(entry);
}

// The batch number than which more than an eighth of the rows are older, and as many as are too
// many; at most `oldest`. `num_older` becomes the number of rows that are older.
uint64_t HeldRows::Cutoff(uint64_t oldest, uint64_t* num_older) const {
  const double excess =
      static_cast<double>(num_bytes_ - max_bytes_) / static_cast<double>(num_bytes_);
  const auto num_wanted =
      static_cast<uint64_t>(static_cast<double>(size()) * std::max(excess, 1.0 / kOldShare));
  uint64_t cutoff = newest_ < kRecent ? 0 : newest_ - kRecent + 1;
  for (*num_older = num_older_; *num_older <= num_wanted && cutoff < oldest; ++cutoff) {
    *num_older += num_used_[cutoff % kRecent];
  }
  return std::min(cutoff, oldest);
}

void HeldRows::Trim(uint64_t oldest) {
  if (num_bytes_ <= max_bytes_) {
    num_inserted_ = 0;
    return;
  }
  uint64_t num_older = 0;
  const auto cutoff = static_cast<uint32_t>(Cutoff(oldest, &num_older));
  if (num_older == 0) return;  // the walk for the rows inserted waits until it can evict any
  const uint64_t num_visits = kMinVisits + kVisitsPerRow * std::exchange(num_inserted_, 0);
  Walk(cutoff, Walk(cutoff, num_visits));  // the first one ends at the end of the index
  if (oldest <= newest_) return;
  // A smaller excess is what each batch leaves where one is in flight at a time. Two walks evict
  // the share of rows that are too many; rows of several sizes may need more.
  for (int i = 0; i < kMaxWalks && num_bytes_ > max_bytes_ + max_bytes_ / 8; ++i) {
    Walk(static_cast<uint32_t>(Cutoff(oldest, &num_older)), index_.size() + 1);
  }
}

// Evicts rows beyond the bound that are older than the cutoff. Returns the visits that are left.
uint64_t HeldRows::Walk(uint32_t cutoff, uint64_t num_visits) {
  std::vector<uint64_t> keys;  // the walk allows no removal
  uint64_t num_left = num_visits, num_bytes = num_bytes_;
  const bool is_over = index_.ForEachFrom(&next_key_, [&](const SignIndex::Entry& entry) {
    if (num_left-- == 0 || num_bytes <= max_bytes_) return false;
    if (static_cast<int32_t>(entry.stamp - cutoff) < 0) {
      keys.push_back(entry.key);
      num_bytes -= slabs_.row_bytes(entry.cell) + kEntryBytes;
    }
    return true;
  });
  for (const uint64_t key : keys) Remove(index_.Find(key));
  if (is_over) next_key_ = 0;
  return is_over ? num_left : 0;
}

bool HeldRows::IsWasteful() const {
  const uint64_t wanted = std::max(max_bytes_, num_bytes_);
  return memory_bytes() > wanted + wanted / 2 + spare_bytes_;
}

bool HeldRows::Compact(uint64_t oldest) {
  store::RowSlabs slabs(&memory_);
  SignIndex index;
  uint64_t num_bytes = 0, next_key = 0;
  const bool fits = index_.ForEachFrom(&next_key, [&](const SignIndex::Entry& entry) {
    if (static_cast<int32_t>(entry.stamp - static_cast<uint32_t>(oldest)) < 0) return true;
    const store::RowShape& shape = slabs_.shape(entry.cell);
    const uint32_t cell = slabs.Allocate(slabs.FindOrAddPool(shape));
    if (cell == kNoCell || !index.Insert({entry.key, cell, entry.stamp})) return false;
    std::copy_n(slabs_.values(entry.cell), shape.Stride(), slabs.values(cell));
    if (shape.has_scalar) *slabs.scalar(cell) = *slabs_.scalar(entry.cell);
    num_bytes += slabs.row_bytes(cell) + kEntryBytes;
    return true;
  });
  if (!fits) return false;
  Clear();
  slabs_ = std::move(slabs);
  index_ = std::move(index);
  num_bytes_ = num_bytes;
  index_.ForEach([&](const SignIndex::Entry& entry) { Count(entry.stamp, 1); });
  return true;
}

void HeldRows::Find(std::span<const uint64_t> signs, std::span<uint32_t> cells) const {
  for (size_t i = 0; i < signs.size(); ++i) {
    if (cells[i] != kNoCell) cells[i] = index_.Find(SignKey(signs[i]))->cell;
  }
}

void HeldRows::Clear() {
  index_.Clear();
  slabs_.Clear();
  num_bytes_ = num_older_ = num_inserted_ = next_key_ = 0;
  num_used_.fill(0);
}

}  // namespace persia::client

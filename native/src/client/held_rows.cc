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
// many; at most `oldest`.
uint64_t HeldRows::Cutoff(uint64_t oldest) const {
  const double excess =
      static_cast<double>(num_bytes_ - max_bytes_) / static_cast<double>(num_bytes_);
  const auto num_wanted =
      static_cast<uint64_t>(static_cast<double>(size()) * std::max(excess, 1.0 / kOldShare));
  uint64_t cutoff = newest_ < kRecent ? 0 : newest_ - kRecent + 1;
  for (uint64_t num_rows = num_older_; num_rows <= num_wanted && cutoff < oldest; ++cutoff) {
    num_rows += num_used_[cutoff % kRecent];
  }
  return std::min(cutoff, oldest);
}

void HeldRows::Trim(uint64_t oldest) {
  const uint64_t num_visits = kMinVisits + kVisitsPerRow * std::exchange(num_inserted_, 0);
  if (num_bytes_ <= max_bytes_) return;
  const auto cutoff = static_cast<uint32_t>(Cutoff(oldest));
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
  if (is_over) next_key_ = 0;
  for (const uint64_t key : keys) Remove(index_.Find(key));
}

void HeldRows::Clear() {
  index_.Clear();
  slabs_.Clear();
  num_bytes_ = num_older_ = num_inserted_ = next_key_ = 0;
  num_used_.fill(0);
}

}  // namespace persia::client

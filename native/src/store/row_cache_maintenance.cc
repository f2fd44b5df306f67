// The part of RowCache that the store's maintenance thread calls: it demotes rows, gives memory
// back and writes rows for checkpoints, some tens at a time, so that calls never wait long.
#include <algorithm>
#include <array>
#include <vector>

#include "store/row_cache.h"
#include "store/row_features.h"

namespace persia::store {
namespace {

constexpr size_t kEntriesPassed = 4096;  // of an index, while the mutex is held

}  // namespace

// A step of some tens of rows: a lookup that waits for the mutex waits for one step.
StatusOr<bool> RowCache::Shrink() {
  Lock lock(mutex_);
  Measure();
  if (resident_.Excess() > 0 && marks_ != nullptr) PrefetchOldest(&lock);
  const uint64_t excess = resident_.Excess();
  if (excess == 0) return false;
  PERSIA_RETURN_IF_ERROR(Demote(std::min<size_t>(excess, kRowsAtATime)));
  return resident_.Excess() > 0;
}

// All entries of the index are gone through, so a cache that is too small for its calls, and has
// too many slabs after each, must not have this all the time.
RowCache::GiveBack RowCache::GiveBackMemory(uint64_t* next) {
  // So much at once that a walk is worth its while, and so little that the rows that are moved have
  // room. A walk costs a pass over the index, so that it may take about a twentieth of the time.
  constexpr uint64_t kMostAtATime = 16 << 20;  // bytes
  constexpr int kRestPerWork = 20;
  constexpr std::chrono::milliseconds kShortestRest{50}, kLongestRest{2000};
  const std::lock_guard lock(mutex_);
  if (*next == 0) {
    Measure();
    const uint64_t excess = ExcessOfSlabs();
    if (excess == 0 && !slabs_.HasLeaving()) return GiveBack::kNothing;
    leaving_since_ = std::chrono::steady_clock::now();
    if (leaving_since_ < rests_until_) return GiveBack::kLater;
    slabs_.BeginLeaving(std::min(excess, kMostAtATime));
  }
  size_t num_moved = 0, num_passed = 0;
  const bool has_ended = index_.ForEachFrom(next, [&](Entry& entry) {
    if (num_moved == kRowsAtATime || num_passed++ == kEntriesPassed) return false;
    if (slabs_.IsLeaving(entry.cell)) num_moved += MoveRow(&entry);
    return true;
  });
  if (!has_ended) return GiveBack::kMore;
  slabs_.FinishLeaving();
  const auto end = std::chrono::steady_clock::now();
  const std::chrono::nanoseconds rest = kRestPerWork * (end - leaving_since_);
  rests_until_ = end + std::clamp<std::chrono::nanoseconds>(rest, kShortestRest, kLongestRest);
  return GiveBack::kLater;  // there may be more
}

bool RowCache::MoveRow(Entry* entry) {
  const RowShape& shape = slabs_.shape(entry->cell);
  const uint32_t cell = slabs_.Allocate(slabs_.FindOrAddPool(shape));
  if (cell == RowSlabs::kNoCell) return false;  // it stays, and its slab with it
  std::copy_n(slabs_.values(entry->cell), shape.Stride(), slabs_.values(cell));
  if (shape.has_scalar) *slabs_.scalar(cell) = *slabs_.scalar(entry->cell);
  slabs_.Free(entry->cell);
  entry->cell = cell;
  // The stamp and the version stay: to all others the row has not changed.
  ++num_moved_;
  return true;
}

// The system reads the page of a file that a row is written to, and that should not take place with
// the shard locked. Which rows leave is decided behind it, anew.
void RowCache::PrefetchOldest(Lock* lock) {
  std::vector<pool::RowPool::Place> places;
  if (oldest_.is_empty()) CollectOldest();
  oldest_.Peek(index_, kRowsAtATime, [&](const Entry& entry) {
    if (IsCold(slabs_, entry.cell) || pinned_.Contains(entry.key)) return false;
    const HotRow hot = HotRowOf(slabs_, entry.cell);
    const RowShape& shape = slabs_.shape(entry.cell);
    if (hot.unsaved != 0 && hot.address != pool::kNoAddress) {
      places.push_back({hot.address, size_t{shape.dim} + shape.state_floats});
    }
    return true;
  });
  if (places.empty()) return;
  lock->unlock();
  tier_.pool().BringNear(places);
  lock->lock();
}

// Rows that change meanwhile are written by WriteForCheckpoint(), so that one walk finds all the
// others.
StatusOr<bool> RowCache::WriteBackUpTo(uint64_t batch, uint64_t* next) {
  const std::lock_guard lock(mutex_);
  std::array<Entry*, kRowsAtATime> unsaved;
  size_t num_unsaved = 0, num_passed = 0;
  const bool has_ended = index_.ForEachFrom(next, [&](Entry& entry) {
    if (num_unsaved == kRowsAtATime || num_passed++ == kEntriesPassed) return false;
    if (IsCold(slabs_, entry.cell)) return true;
    const HotRow hot = HotRowOf(slabs_, entry.cell);
    if (hot.unsaved != 0 && hot.unsaved <= batch) unsaved[num_unsaved++] = &entry;
    return true;
  });
  if (num_unsaved > 0) PERSIA_RETURN_IF_ERROR(WriteBack(std::span(unsaved).first(num_unsaved)));
  return !has_ended;
}

}  // namespace persia::store

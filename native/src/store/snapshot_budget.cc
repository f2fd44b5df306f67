#include "store/snapshot_budget.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/mapped_memory.h"

namespace persia::store {
namespace {

constexpr uint64_t kMinPieceBytes = 16 << 10;
// A huge page: the system is asked once in many thousand rows.
constexpr uint64_t kMaxPieceBytes = MappedMemory::kHugePageBytes;

}  // namespace

void SnapshotBudget::Begin(uint64_t limit_bytes, std::chrono::milliseconds patience,
                           size_t num_shards) {
  const std::lock_guard lock(mutex_);
  limit_bytes_ = limit_bytes;
  // Each batch that is read ahead may take one that is not full from each shard, six in all with
  // the one that is written and the shard's own; these alone must not reach the limit.
  piece_bytes_ = std::clamp(limit_bytes / (12 * num_shards), kMinPieceBytes, kMaxPieceBytes);
  patience_ = patience;
  waiting_bytes_ = 0;
  NoteWaiting();
  why_failed_ = Status::Ok();
  has_failed_.store(false, std::memory_order_relaxed);
}

// Calls that wait go on: nothing is saved any more.
void SnapshotBudget::End() {
  const std::lock_guard lock(mutex_);
  is_full_.store(false, std::memory_order_relaxed);
  pieces_ = std::vector<RowRecords>();
  has_room_.notify_all();
}

// Never refuses: the caller has a row to save and holds a shard. At the limit it is the next call
// that waits, before it takes any lock.
RowRecords SnapshotBudget::TakePiece(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  RowRecords piece;
  if (!pieces_.empty()) {
    piece = std::move(pieces_.back());
    pieces_.pop_back();
  }
  if (!piece.HasRoom(bytes)) piece.Reserve(std::max(piece_bytes_, bytes));
  waiting_bytes_ += piece.capacity_bytes();
  NoteWaiting();
  if (waiting_bytes_ > limit_bytes_ && !has_failed()) {
    is_full_.store(true, std::memory_order_relaxed);
  }
  // Calls that had passed WaitForRoom() may still take pieces, but not without end.
  if (waiting_bytes_ / 2 > limit_bytes_) FailLocked();
  return piece;
}

void SnapshotBudget::Release(std::vector<RowRecords>* pieces) {
  if (pieces->empty()) return;
  const std::lock_guard lock(mutex_);
  for (RowRecords& piece : *pieces) {
    // A piece that grew while it was filled is larger now than when it was taken.
    waiting_bytes_ -= std::min(waiting_bytes_, piece.capacity_bytes());
    piece.Clear();
    pieces_.push_back(std::move(piece));
  }
  pieces->clear();
  NoteWaiting();
  if (waiting_bytes_ > limit_bytes_) return;
  is_full_.store(false, std::memory_order_relaxed);
  has_room_.notify_all();
}

// Up to half of the limit may be pieces that are hardly used.
void SnapshotBudget::NoteWaiting() {
  is_nearly_full_.store(waiting_bytes_ > limit_bytes_ / 4 * 3, std::memory_order_relaxed);
}

void SnapshotBudget::Fail(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (!has_failed()) why_failed_ = why;
  FailLocked();
}

void SnapshotBudget::FailLocked() {
  has_failed_.store(true, std::memory_order_relaxed);
  is_full_.store(false, std::memory_order_relaxed);
  has_room_.notify_all();
}

Status SnapshotBudget::FailedStatus() const {
  const std::lock_guard lock(mutex_);
  if (!why_failed_.ok()) return why_failed_;
  return ResourceExhausted(
      "the snapshot was given up: training changed rows faster than it was read, more than ",
      limit_bytes_,
      " bytes of them were waiting and held up training too long; read it faster or by more "
      "threads, or allow more bytes or patience");
}

// One that has waited too long gives the snapshot up for all: they need not wait one after another.
void SnapshotBudget::Wait() {
  std::unique_lock lock(mutex_);
  const auto has_room = [&] { return !is_full_.load(std::memory_order_relaxed); };
  if (!has_room_.wait_for(lock, patience_, has_room)) FailLocked();
}

}  // namespace persia::store

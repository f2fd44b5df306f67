// SnapshotBudget: bounds the memory of rows that were saved for a snapshot and wait to be read.
//
// Training that would exceed the limit waits until the reader has caught up, but no longer than
// `patience`. After that, or at twice the limit, the snapshot fails and training continues without
// it: a dump that cannot keep up must not stop a job.
//
// It also carries the snapshot's failure, which training threads find and the reader reports.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "store/row_records.h"

namespace persia::store {

// Thread-safe.
class SnapshotBudget {
 public:
  // A snapshot begins, or ends. The caller holds the store exclusively.
  void Begin(uint64_t limit_bytes, std::chrono::milliseconds patience, size_t num_shards);
  void End();

  // Called before a training call takes any lock: the reader needs those to catch up, so a call
  // that waited with one held would wait for itself.
  void WaitForRoom() {
    if (is_full_.load(std::memory_order_relaxed)) [[unlikely]]
      Wait();
  }

  // Memory for rows to be saved, `bytes` of them at least.
  RowRecords TakePiece(uint64_t bytes);
  // Takes back rows that have been read; their memory is used again.
  void Release(std::vector<RowRecords>* pieces);

  // Training must wait soon, unless pieces come back.
  bool is_nearly_full() const { return is_nearly_full_.load(std::memory_order_relaxed); }

  // The snapshot has come to nothing; `why` is Ok where it was for want of room or patience.
  void Fail(const Status& why = Status::Ok());
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }
  // Why, for the reader.
  Status FailedStatus() const;

 private:
  void Wait();
  void FailLocked();
  void NoteWaiting();

  std::atomic<bool> is_full_ = false;  // there is more than the limit, and it may still go
  std::atomic<bool> is_nearly_full_ = false;
  std::atomic<bool> has_failed_ = false;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable has_room_;
  uint64_t limit_bytes_ = 0;
  uint64_t piece_bytes_ = 0;
  uint64_t waiting_bytes_ = 0;  // room in the pieces that were taken and have not come back
  std::chrono::milliseconds patience_{0};
  Status why_failed_;
  std::vector<RowRecords> pieces_;  // empty, to be used again; asking the system is slow
};

}  // namespace persia::store

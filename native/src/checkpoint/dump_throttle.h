// DumpThrottle: limits the processor time of the threads that write a snapshot during training.
//
// Encoding costs a microsecond a row. Low priority alone does not keep that from training: a step
// through sockets leaves each processor for moments, and finds it and its cache taken when it wants
// it back. So writers sleep between small pieces of work, and a dump takes longer. They run at full
// speed if the store is not trained, or if saved rows come near the limit at which training would
// have to wait for them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "store/store_snapshot.h"

namespace persia::checkpoint {

// Thread-safe.
class DumpThrottle {
 public:
  // Rows to write between two calls of Throttle(): some tenths of a millisecond.
  static constexpr size_t kRowsAtATime = 256;

  // `max_processors`: what all threads together may take of processors on average while the store
  // is trained; 0: no limit. `*rows` must outlive it.
  DumpThrottle(const store::StoreSnapshot* rows, double max_processors)
      : rows_(*rows), max_processors_(max_processors) {}

  // To be called between two pieces of work by the thread that does them, which holds nothing that
  // others wait for. What it has done since its last call counts, wherever that was.
  void Throttle();
  // No thread is throttled from here on.
  void Stop() { has_stopped_ = true; }

 private:
  using Clock = std::chrono::steady_clock;

  bool MustThrottle(Clock::time_point now);

  const store::StoreSnapshot& rows_;
  const double max_processors_;
  std::atomic<bool> has_stopped_ = false;

  std::mutex mutex_;                // guards what follows
  Clock::time_point is_paid_at_{};  // all work that was done, at max_processors_
  uint64_t num_updates_ = 0;
  Clock::time_point last_update_{};
};

}  // namespace persia::checkpoint

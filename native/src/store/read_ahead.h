// ReadAhead: signs whose rows are wanted in memory soon, between the calls that name them and the
// thread that brings the rows there (tier.h).
//
// Bounded: what has no room is dropped. The lookup then reads these rows itself.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

namespace persia::store {

// Thread-safe.
class ReadAhead {
 public:
  explicit ReadAhead(size_t max_signs) : max_signs_(max_signs) {}

  // Those behind the first that have room are dropped.
  void Add(std::span<const uint64_t> signs);
  // Waits for the oldest that were added. False: Stop() was called.
  bool Take(std::vector<uint64_t>* signs);
  void Stop();

  uint64_t num_dropped() const;
  uint64_t memory_bytes() const;

 private:
  const size_t max_signs_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<std::vector<uint64_t>> waiting_;  // by call
  size_t num_waiting_ = 0;
  uint64_t num_dropped_ = 0;
  bool is_stopping_ = false;
};

}  // namespace persia::store

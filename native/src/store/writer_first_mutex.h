// WriterFirstMutex: a shared mutex whose exclusive owners do not wait for readers that come later.
//
// std::shared_mutex may let readers in for ever while an exclusive lock is wanted. The calls of a
// busy store overlap all the time, so a cut through all of them would never come about.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>

namespace persia::store {

// For std::unique_lock and std::shared_lock. Not recursive.
class WriterFirstMutex {
 public:
  void lock() {
    num_writers_.fetch_add(1);
    {
      // Held until the readers of before are gone; the new ones queue up here.
      const std::lock_guard turn(turn_);
      mutex_.lock();
    }
    num_writers_.fetch_sub(1);
  }
  void unlock() { mutex_.unlock(); }

  void lock_shared() {
    if (num_writers_.load(std::memory_order_relaxed) != 0) [[unlikely]] {
      const std::lock_guard turn(turn_);
    }
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::atomic<uint32_t> num_writers_ = 0;  // waiting
  std::mutex turn_;
  std::shared_mutex mutex_;
};

}  // namespace persia::store

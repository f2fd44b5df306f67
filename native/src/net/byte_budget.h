// ByteBudget: how many bytes of request bodies a server
// holds at once; who asks for more waits in line.
//
// Thread-safe. First come, first served, so that a large body is not starved by small ones. A body
// above the whole budget is let in when nothing else is held: it could never be otherwise.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

namespace persia::net {

class ByteBudget {
 public:
  explicit ByteBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // True: `bytes` are taken. False: they will be, and then `granted` runs once, on the thread that
  // released (keep it short). Each taken amount must be released.
  bool Acquire(uint64_t bytes, std::function<void()> granted);
  void Release(uint64_t bytes);
  // Forgets who waits, without running anything.
  void DropWaiters();

 private:
  struct Waiter {
    uint64_t bytes;
    std::function<void()> granted;
  };
  bool Fits(uint64_t bytes) const {
    return held_ == 0 || (held_ <= limit_bytes_ && bytes <= limit_bytes_ - held_);
  }

  const uint64_t limit_bytes_;
  std::mutex mutex_;
  uint64_t held_ = 0;  // may pass the limit by one oversized body
  std::deque<Waiter> waiters_;
};

// Releases what was acquired, when it goes.
class ByteLease {
 public:
  ByteLease() = default;
  ByteLease(ByteBudget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}
  ByteLease(ByteLease&& other) noexcept : budget_(other.budget_), bytes_(other.bytes_) {
    other.budget_ = nullptr;
  }
  ByteLease& operator=(ByteLease&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~ByteLease() {
    if (budget_ != nullptr) budget_->Release(bytes_);
  }

 private:
  ByteBudget* budget_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace persia::net

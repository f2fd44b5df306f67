#include "net/byte_budget.h"

#include <utility>
#include <vector>

namespace persia::net {

// A lease that overdraws keeps the right to do so until it ends: a body that has begun always ends.
bool ByteBudget::Take(uint64_t bytes, bool is_next, ByteLease* lease) {
  const bool fits = held_ <= limit_bytes_ && bytes <= limit_bytes_ - held_;
  if (!(fits && is_next) && held_ > 0 && !lease->overdraws_) {
    // The overdraft is for a body that has begun.
    if (overdrawn_ || lease->bytes_ == 0) return false;
    overdrawn_ = lease->overdraws_ = true;
  }
  held_ += bytes;
  lease->budget_ = this;
  lease->bytes_ += bytes;
  return true;
}

bool ByteBudget::Acquire(uint64_t bytes, ByteLease* lease, Granted granted) {
  std::lock_guard lock(mutex_);
  if (Take(bytes, waiters_.empty(), lease)) return true;
  waiters_.push_back({bytes, std::move(*lease), std::move(granted)});
  return false;
}

void ByteBudget::Release(uint64_t bytes, bool overdraws) {
  std::vector<Waiter> granted;
  {
    std::lock_guard lock(mutex_);
    held_ -= bytes;
    if (overdraws) overdrawn_ = false;
    // Those behind the first that does not fit may still get the overdraft.
    bool is_next = true;
    for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
      if (Take(waiter->bytes, is_next, &waiter->lease)) {
        granted.push_back(std::move(*waiter));
        waiter = waiters_.erase(waiter);
      } else {
        if (overdrawn_) break;
        is_next = false;
        ++waiter;
      }
    }
  }
  // Outside the lock: a grant may be released at once.
  for (Waiter& waiter : granted) waiter.granted(std::move(waiter.lease));
}

void ByteBudget::DropWaiters() {
  // Destroyed outside the lock: a waiter has a lease, and may own the last reference to its
  // connection.
  std::deque<Waiter> dropped;
  {
    std::lock_guard lock(mutex_);
    dropped.swap(waiters_);
  }
}

}  // namespace persia::net

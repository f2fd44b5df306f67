#include "net/byte_budget.h"

#include <utility>
#include <vector>

namespace persia::net {

bool ByteBudget::Acquire(uint64_t bytes, std::function<void()> granted) {
  std::lock_guard lock(mutex_);
  if (waiters_.empty() && Fits(bytes)) {
    held_ += bytes;
    return true;
  }
  waiters_.push_back({bytes, std::move(granted)});
  return false;
}

void ByteBudget::Release(uint64_t bytes) {
  std::vector<std::function<void()>> granted;
  {
    std::lock_guard lock(mutex_);
    held_ -= bytes;
    while (!waiters_.empty() && Fits(waiters_.front().bytes)) {
      held_ += waiters_.front().bytes;
      granted.push_back(std::move(waiters_.front().granted));
      waiters_.pop_front();
    }
  }
  // Outside the lock: a grant may be given back at once.
  for (const auto& run : granted) run();
}

void ByteBudget::DropWaiters() {
  // Destroyed outside the lock: a waiter may own the last reference to its connection.
  std::deque<Waiter> dropped;
  std::lock_guard lock(mutex_);
  dropped.swap(waiters_);
}

}  // namespace persia::net

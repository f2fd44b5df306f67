// ByteBudget: how many bytes of request bodies a server holds at once. Private to net/.
//
// A body takes its bytes in steps, as they arrive, so that a header alone takes nothing that others
// need. Who asks for more than fits waits in line, first come, first served: a large body is not
// starved by small ones.
//
// Bodies that each hold a part and wait for the rest would block one another. So one body at a
// time, which has begun, may pass the limit (the overdraft) until it is released. At most
// limit + one body are held.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

namespace persia::net {

class ByteBudget;

// The bytes that one body has taken. Releases them when it is destroyed. Move-only.
class ByteLease {
 public:
  ByteLease() = default;
  ByteLease(ByteLease&& other) noexcept { *this = std::move(other); }
  ByteLease& operator=(ByteLease&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    std::swap(overdraws_, other.overdraws_);
    return *this;
  }
  ~ByteLease();

 private:
  friend class ByteBudget;
  ByteBudget* budget_ = nullptr;
  uint64_t bytes_ = 0;
  bool overdraws_ = false;
};

class ByteBudget {
 public:
  // Receives the lease with the bytes added.
  using Granted = std::function<void(ByteLease)>;

  explicit ByteBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Adds `bytes` to `lease` and returns true; or keeps the lease until they fit, returns false, and
  // `granted` runs once, on the thread that released (keep it short).
  bool Acquire(uint64_t bytes, ByteLease* lease, Granted granted);
  // Forgets who waits, without running anything.
  void DropWaiters();

 private:
  friend class ByteLease;
  struct Waiter {
    uint64_t bytes;
    ByteLease lease;
    Granted granted;
  };

  void Release(uint64_t bytes, bool overdraws);
  // With mutex_ held: takes the bytes if they fit and nobody is before the lease, if nothing else
  // is held, or by the overdraft.
  bool Take(uint64_t bytes, bool is_next, ByteLease* lease);

  const uint64_t limit_bytes_;
  std::mutex mutex_;
  uint64_t held_ = 0;
  bool overdrawn_ = false;  // by one lease
  std::deque<Waiter> waiters_;
};

inline ByteLease::~ByteLease() {
  if (budget_ != nullptr) budget_->Release(bytes_, overdraws_);
}

}  // namespace persia::net

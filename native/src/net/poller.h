// Poller: one epoll set on which all threads of a server wait together. Private to net/
// and serving/.
//
// The kernel wakes exactly one thread for an event, the one that began to wait last, and that
// thread does the whole work: no second thread is woken to hand a request to, or to take over the
// waiting, as the others wait already. Descriptors are one-shot: after an event nothing more comes
// from that descriptor until Arm(), so one thread at a time deals with it.
//
// Thread-safe once Open() has returned Ok. An event carries the tag given to Add(), not a pointer:
// what the tag stood for may be gone by the time its event is handled.
#pragma once

#include <sys/epoll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "base/status.h"
#include "net/types.h"

namespace persia::net {

// A file descriptor and the duty to close it.
//
// Move-only. -1 stands for no descriptor. Closing is the last thing that happens to a socket: as
// long as a thread may use the number, it must not be given to another file.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

class Poller {
 public:
  static constexpr uint64_t kStopTag = 0;   // the event of Stop(), again and again
  static constexpr uint64_t kTimerTag = 1;  // the event of WakeAt()
  static constexpr uint64_t kFirstFreeTag = 2;

  struct Event {
    uint64_t tag;
    uint32_t events;  // EPOLLIN | ...
  };

  // kIOError when the system is out of descriptors.
  Status Open();
  // `events` may be 0. False when the system refuses. A closed descriptor leaves by itself.
  // With `events` of 0 a descriptor can be known before its owner is ready for events, which Arm()
  // then begins.
  bool Add(int fd, uint64_t tag, uint32_t events);
  void Arm(int fd, uint64_t tag, uint32_t events);
  // Blocks until there is an event.
  Event Wait();
  // One that there is already, or none.
  std::optional<Event> Poll();
  // One event of kTimerTag comes at `time` or, when an earlier one was asked for and has not come
  // yet, at that one's time: who is woken looks what is due and asks again.
  // One timer for all deadlines of a server: a timer for each connection would cost
  // descriptors. Never later than asked for, hence the earlier time wins.
  void WakeAt(Clock::time_point time);
  // Every Wait, now and later, returns kStopTag.
  // For good: a poller that was stopped is not used again.
  void Stop();

 private:
  Event Take(const epoll_event& event);

  UniqueFd epoll_;
  UniqueFd stop_;   // an eventfd that stays readable
  UniqueFd timer_;  // a timerfd
  std::mutex timer_mutex_;
  Clock::time_point timer_set_to_ = Clock::time_point::max();  // max: not set
};

}  // namespace persia::net

#include "net/poller.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace persia::net {
namespace {

// A time on CLOCK_MONOTONIC, which Clock counts too. Zero would stop the timer.
itimerspec ToTimerSpec(Clock::time_point time) {
  using std::chrono::nanoseconds;
  using std::chrono::seconds;
  const auto since_boot = std::max(nanoseconds(time.time_since_epoch()), nanoseconds(1));
  const auto whole = std::chrono::duration_cast<seconds>(since_boot);
  itimerspec spec = {};
  spec.it_value.tv_sec = whole.count();
  spec.it_value.tv_nsec = (since_boot - whole).count();
  return spec;
}

}  // namespace

// Descriptors are made here rather than in the constructor, which could not report that there are
// none left.
Status Poller::Open() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  epoll_event for_all = {.events = EPOLLIN, .data = {.u64 = kStopTag}};  // not one-shot
  if (epoll_.get() < 0 || stop_.get() < 0 || timer_.get() < 0 ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &for_all) != 0 ||
      !Add(timer_.get(), kTimerTag, EPOLLIN)) {
    return IOError("cannot wait for connections: ", std::system_category().message(errno));
  }
  return Status::Ok();
}

bool Poller::Add(int fd, uint64_t tag, uint32_t events) {
  // One-shot: the thread that gets the event has the descriptor to itself until Arm().
  epoll_event event = {.events = events | EPOLLONESHOT, .data = {.u64 = tag}};
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Poller::Arm(int fd, uint64_t tag, uint32_t events) {
  epoll_event event = {.events = events | EPOLLONESHOT, .data = {.u64 = tag}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

Poller::Event Poller::Wait() {
  epoll_event event;
  while (::epoll_wait(epoll_.get(), &event, 1, -1) != 1) {
  }  // interrupted by a signal
  return Take(event);
}

std::optional<Poller::Event> Poller::Poll() {
  epoll_event event;
  if (::epoll_wait(epoll_.get(), &event, 1, 0) != 1) return std::nullopt;
  return Take(event);
}

Poller::Event Poller::Take(const epoll_event& event) {
  // Read and armed again under the lock, so that a WakeAt() meanwhile is not lost.
  if (event.data.u64 == kTimerTag) {
    std::lock_guard lock(timer_mutex_);
    uint64_t num_expirations = 0;
    [[maybe_unused]] const ssize_t ignored =
        ::read(timer_.get(), &num_expirations, sizeof(num_expirations));
    timer_set_to_ = Clock::time_point::max();
    Arm(timer_.get(), kTimerTag, EPOLLIN);
  }
  return {event.data.u64, event.events};
}

void Poller::WakeAt(Clock::time_point time) {
  std::lock_guard lock(timer_mutex_);
  if (time >= timer_set_to_) return;
  timer_set_to_ = time;
  const itimerspec spec = ToTimerSpec(time);
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Poller::Stop() {
  // Never read: the descriptor stays readable, and every thread that waits sees it.
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(stop_.get(), &one, sizeof(one));
}

}  // namespace persia::net

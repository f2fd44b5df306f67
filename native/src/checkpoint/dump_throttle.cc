#include "checkpoint/dump_throttle.h"

#include <time.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace persia::checkpoint {
namespace {

using std::chrono::nanoseconds;

// A store without an update for so long is not being trained.
constexpr std::chrono::seconds kTrainingEnds{1};
// How soon a sleeping thread notices that it need not sleep.
constexpr std::chrono::milliseconds kLongestNap{20};
// Work comes in pieces of some tenths of a millisecond: smaller ones spend their time on waking up
// and on caches that others have used meanwhile, larger ones are in the way.
constexpr std::chrono::milliseconds kShortestNap{5};
// Of a thread that has worked for long on other things meanwhile.
constexpr std::chrono::milliseconds kMostWork{50};

// Of this thread's processor time, since the last call.
nanoseconds TakeWork() {
  thread_local std::optional<nanoseconds>
      taken;  // none: what it did before it came here is not known
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  const nanoseconds now = std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
  return std::min<nanoseconds>(now - std::exchange(taken, now).value_or(now), kMostWork);
}

}  // namespace

// A common account of all threads: work is paid for by time that passes, at max_processors of it a
// second. The thread that leaves it in debt sleeps until it is paid.
void DumpThrottle::Throttle() {
  if (max_processors_ <= 0) return;
  const nanoseconds work = TakeWork();
  Clock::time_point end;
  auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    is_paid_at_ = std::max(is_paid_at_, now);
    if (!MustThrottle(now)) {
      is_paid_at_ = now;
      return;
    }
    is_paid_at_ += std::chrono::duration_cast<nanoseconds>(work / max_processors_);
    end = is_paid_at_;
  }
  if (end - now < kShortestNap) return;  // the debt stays
  while (now < end) {
    std::this_thread::sleep_for(std::min<nanoseconds>(end - now, kLongestNap));
    now = Clock::now();
    const std::lock_guard lock(mutex_);
    if (!MustThrottle(now)) return;
  }
}

// The caller holds mutex_. Before the first update nothing shows that anyone trains.
bool DumpThrottle::MustThrottle(Clock::time_point now) {
  if (has_stopped_ || rows_.NeedsRoom()) return false;
  const uint64_t num_updates = rows_.num_updates();
  if (std::exchange(num_updates_, num_updates) != num_updates) last_update_ = now;
  return num_updates > 0 && now - last_update_ < kTrainingEnds;
}

}  // namespace persia::checkpoint

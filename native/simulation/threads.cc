// The functions of pthreads, of futexes and of the clock, as fibers of a World.
//
// They are hidden in this library, which has its own copy of libstdc++: what is linked into it uses
// them, and the program that loads it does not.
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>

#include "world.h"

using persia::simulation::Fiber;
using persia::simulation::kNever;
using persia::simulation::Time;
using persia::simulation::World;

namespace {

constexpr Time kSecond = 1'000'000'000;

Time TimeOf(const timespec* time) { return time->tv_sec * kSecond + time->tv_nsec; }

// A mutex is its first word: whether it is locked. Static initialisers are zeros.
int& Locked(pthread_mutex_t* mutex) { return *reinterpret_cast<int*>(mutex); }
// A reader-writer lock is its first word: the number of readers, or -1 for a writer.
int& Holders(pthread_rwlock_t* lock) { return *reinterpret_cast<int*>(lock); }

int WaitOnCondition(pthread_cond_t* condition, pthread_mutex_t* mutex, Time until) {
  World& world = World::Get();
  Locked(mutex) = 0;
  world.Wake(mutex, 1);
  const bool was_woken = world.Wait(condition, until);
  while (Locked(mutex) != 0) world.Wait(mutex);
  Locked(mutex) = 1;
  return was_woken ? 0 : ETIMEDOUT;
}

}  // namespace

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t*, void* (*body)(void*), void* argument) {
  World& world = World::Get();
  Fiber* fiber = world.Spawn(world.current_process(), [body, argument] { body(argument); });
  *thread = reinterpret_cast<pthread_t>(fiber);
  return 0;
}

int pthread_join(pthread_t thread, void**) {
  const auto* fiber = reinterpret_cast<Fiber*>(thread);
  while (!fiber->has_ended) World::Get().Wait(fiber);
  return 0;
}

int pthread_detach(pthread_t) { return 0; }
pthread_t pthread_self() { return reinterpret_cast<pthread_t>(World::Get().current()); }
int pthread_setname_np(pthread_t, const char*) { return 0; }

int pthread_mutex_init(pthread_mutex_t* mutex, const pthread_mutexattr_t*) {
  Locked(mutex) = 0;
  return 0;
}
int pthread_mutex_destroy(pthread_mutex_t*) { return 0; }
int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  if (Locked(mutex) != 0) return EBUSY;
  Locked(mutex) = 1;
  return 0;
}
int pthread_mutex_lock(pthread_mutex_t* mutex) {
  World::Get().MaybeYield(mutex);
  while (Locked(mutex) != 0) World::Get().Wait(mutex);
  Locked(mutex) = 1;
  return 0;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  Locked(mutex) = 0;
  World::Get().Wake(mutex, 1);
  return 0;
}

int pthread_cond_init(pthread_cond_t*, const pthread_condattr_t*) { return 0; }
int pthread_cond_destroy(pthread_cond_t*) { return 0; }
int pthread_cond_signal(pthread_cond_t* condition) {
  World::Get().Wake(condition, 1);
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) {
  World::Get().Wake(condition);
  return 0;
}
int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return WaitOnCondition(condition, mutex, kNever);
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t,
                           const timespec* until) {
  return WaitOnCondition(condition, mutex, TimeOf(until));
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  return WaitOnCondition(condition, mutex, TimeOf(until));
}

int pthread_rwlock_init(pthread_rwlock_t* lock, const pthread_rwlockattr_t*) {
  Holders(lock) = 0;
  return 0;
}
int pthread_rwlock_destroy(pthread_rwlock_t*) { return 0; }
int pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  while (Holders(lock) < 0) World::Get().Wait(lock);
  ++Holders(lock);
  return 0;
}
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  while (Holders(lock) != 0) World::Get().Wait(lock);
  Holders(lock) = -1;
  return 0;
}
int pthread_rwlock_tryrdlock(pthread_rwlock_t* lock) {
  if (Holders(lock) < 0) return EBUSY;
  ++Holders(lock);
  return 0;
}
int pthread_rwlock_trywrlock(pthread_rwlock_t* lock) {
  if (Holders(lock) != 0) return EBUSY;
  Holders(lock) = -1;
  return 0;
}
int pthread_rwlock_unlock(pthread_rwlock_t* lock) {
  Holders(lock) = Holders(lock) < 0 ? 0 : Holders(lock) - 1;
  World::Get().Wake(lock);
  return 0;
}

// One time for all clocks.
int clock_gettime(clockid_t, timespec* time) {
  const Time now = World::Get().ReadClock();
  *time = {now / kSecond, now % kSecond};
  return 0;
}

int nanosleep(const timespec* time, timespec*) {
  World& world = World::Get();
  const Time until = world.now() + TimeOf(time);
  world.Wait(&until, until);
  return 0;
}

int clock_nanosleep(clockid_t, int flags, const timespec* time, timespec*) {
  World& world = World::Get();
  const Time until = TimeOf(time) + ((flags & TIMER_ABSTIME) != 0 ? 0 : world.now());
  world.Wait(&until, until);
  return 0;
}

int sched_yield() {
  World::Get().Yield();
  return 0;
}

// Of futures: libstdc++ calls futexes by their number.
long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  if (number != SYS_futex) {
    static const auto real = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_DEFAULT, "syscall"));
    return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                arguments[5]);
  }
  World& world = World::Get();
  const auto* word = reinterpret_cast<const unsigned*>(arguments[0]);
  const int operation = static_cast<int>(arguments[1]) & FUTEX_CMD_MASK;
  if (operation == FUTEX_WAKE) {
    world.Wake(word, static_cast<size_t>(arguments[2]));
    return 0;
  }
  if (*word != static_cast<unsigned>(arguments[2])) {
    errno = EAGAIN;
    return -1;
  }
  const auto* limit = reinterpret_cast<const timespec*>(arguments[3]);
  Time until = kNever;
  if (limit != nullptr) {
    until = TimeOf(limit) + (operation == FUTEX_WAIT ? world.now() : 0);
  }
  if (world.Wait(word, until)) return 0;
  errno = ETIMEDOUT;
  return -1;
}

}  // extern "C"

// In place of persia::DrawIncarnation, which asks the system: the linker's option --wrap.
extern "C" uint64_t __wrap__ZN6persia15DrawIncarnationEv() { return World::Get().Random() | 1; }

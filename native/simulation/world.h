// World: a simulated machine room. Threads are fibers on one thread of the real system, the clock
// is a number, and what happens next follows from a seed.
//
// threads.cc defines the functions of pthreads and of the clock in terms of this, so that the
// product's threads, mutexes, conditions and futures run here as they are. Fibers change only where
// they wait, and at mutexes of watched objects.
#pragma once

#include <setjmp.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

namespace persia::simulation {

using Time = int64_t;  // nanoseconds
inline constexpr Time kNever = INT64_MAX;

// It runs one fiber after the other: to begin on a stack takes calls of the system.
struct Stack {
  void* memory = nullptr;
  bool is_idle = false;  // waits for its next fiber
  jmp_buf context;       // and where
};

struct Fiber {
  jmp_buf context;  // where it waits
  Stack* stack = nullptr;
  bool has_begun = false;
  std::function<void()> body;
  int process = 0;
  const void* waits_for = nullptr;  // null: runs, or is ready
  uint64_t num_waits = 0;           // so that a timer wakes the wait that it was set for
  bool timed_out = false;
  bool has_ended = false;
};

// A process of the simulation: killed with its fibers, frozen, or running.
struct Process {
  int host = 0;
  bool is_dead = false;
  bool is_frozen = false;
  std::vector<Fiber*> parked;               // ready, while it is frozen
  std::deque<std::function<void()>> inbox;  // what has happened to it, while it is frozen
};

class World {
 public:
  static World& Get();
  explicit World(uint64_t seed);
  ~World();

  Time now() const { return now_; }
  Time* clock() { return &now_; }
  // Nothing can run before it.
  Time* next() { return &next_; }
  // Reading a clock takes time, so that a loop that waits for it ends.
  Time ReadClock() { return now_ += 50; }
  uint64_t Random() { return random_(); }
  // Uniform in [low, high].
  Time Between(Time low, Time high) { return low + static_cast<Time>(Random() % (high - low + 1)); }
  bool Chance(double probability) {
    return static_cast<double>(Random() >> 11) * 0x1p-53 < probability;
  }

  int AddProcess(int host);
  Process& process(int number) { return *processes_[number]; }
  int current_process() const { return fiber_ == nullptr ? outside_ : fiber_->process; }
  // Of what is made outside of fibers.
  void EnterProcess(int number) { outside_ = number; }
  void Kill(int number);
  void Freeze(int number, bool is_frozen);

  Fiber* Spawn(int process, std::function<void()> body);
  Fiber* current() const { return fiber_; }
  // Suspends the fiber until Wake(key), or until the time. False: it was the time.
  bool Wait(const void* key, Time until = kNever);
  void Wake(const void* key, size_t limit = SIZE_MAX);
  // Lets others run now.
  void Yield();
  // Yields now and then, if the address belongs to a watched object.
  void MaybeYield(const void* mutex);
  void Watch(const void* object, size_t num_bytes);

  // Runs `event` at a time; as a process: dropped once it is dead, and later while it is frozen.
  void At(Time when, std::function<void()> event);
  void AtProcess(int process, Time when, std::function<void()> event);

  // When something can run; kNever if nothing can.
  Time NextTime() const;
  // Runs one fiber to its next wait, or one event.
  void Step();
  void NoteNext() { next_ = NextTime(); }
  uint64_t num_steps() const { return num_steps_; }

 private:
  struct Event {
    Time when;
    uint64_t order;
    std::function<void()> run;
    bool operator<(const Event& other) const {  // the next one on top of the heap
      return when != other.when ? when > other.when : order > other.order;
    }
  };

  void MakeReady(Fiber* fiber);
  void Resume(Fiber* fiber);
  void SwitchOut();
  void Enter();
  void Left();
  static void Run();

  Time now_ = 1'000'000'000'000;
  Time next_ = 0;
  std::mt19937_64 random_;
  uint64_t num_events_ = 0;
  uint64_t num_steps_ = 0;
  std::vector<Event> events_;  // a heap
  std::vector<Fiber*> ready_;
  std::unordered_map<const void*, std::vector<Fiber*>> waiting_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::map<const void*, size_t> watched_;
  Fiber* fiber_ = nullptr;
  int outside_ = 0;
  jmp_buf main_;
};

}  // namespace persia::simulation

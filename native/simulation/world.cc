// A jump to another stack is no error here.
#undef _FORTIFY_SOURCE

#include "world.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace persia::simulation {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr double kYieldAtLock = 0.1;
// From seed to seed: their pages are there already. Before the world, whose end fills it.
std::vector<Stack*> free_stacks;
std::unique_ptr<World> world;

}  // namespace

World& World::Get() {
  if (world == nullptr) world = std::make_unique<World>(0);
  return *world;
}

void Reset(uint64_t seed) {
  world.reset();
  world = std::make_unique<World>(seed);
}

World::World(uint64_t seed) : random_(seed) { AddProcess(0); }

// What dead and unfinished fibers hold is lost: the caller runs few seeds in one process.
World::~World() {
  for (const auto& fiber : fibers_) {
    if (fiber->stack != nullptr) free_stacks.push_back(fiber->stack);  // its next fiber begins anew
  }
}

int World::AddProcess(int host) {
  processes_.push_back(std::make_unique<Process>());
  processes_.back()->host = host;
  return static_cast<int>(processes_.size()) - 1;
}

void World::Kill(int number) {
  Process& process = *processes_[number];
  process.is_dead = true;
  process.inbox.clear();
  process.parked.clear();
  std::erase_if(ready_, [&](Fiber* fiber) { return fiber->process == number; });
  for (auto& [key, fibers] : waiting_) {
    std::erase_if(fibers, [&](Fiber* fiber) { return fiber->process == number; });
  }
}

void World::Freeze(int number, bool is_frozen) {
  Process& process = *processes_[number];
  process.is_frozen = is_frozen;
  if (is_frozen) {
    std::erase_if(ready_, [&](Fiber* fiber) {
      if (fiber->process != number) return false;
      process.parked.push_back(fiber);
      return true;
    });
    return;
  }
  for (Fiber* fiber : std::exchange(process.parked, {})) MakeReady(fiber);
  for (auto& event : std::exchange(process.inbox, {})) AtProcess(number, now_, std::move(event));
}

Fiber* World::Spawn(int process, std::function<void()> body) {
  fibers_.push_back(std::make_unique<Fiber>());
  Fiber* fiber = fibers_.back().get();
  fiber->body = std::move(body);
  fiber->process = process;
  if (free_stacks.empty()) {
    fiber->stack = new Stack;
    fiber->stack->memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack->memory == MAP_FAILED) std::abort();
  } else {
    fiber->stack = free_stacks.back();
    free_stacks.pop_back();
  }
  MakeReady(fiber);
  return fiber;
}

// Contexts only begin on a new stack: each change of one asks the system for the mask of signals,
// and jumps do not.
void World::Enter() {
  if (std::exchange(fiber_->has_begun, true)) _longjmp(fiber_->context, 1);
  if (std::exchange(fiber_->stack->is_idle, false)) _longjmp(fiber_->stack->context, 1);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber_->stack->memory;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, &World::Run, 0);
  setcontext(&context);
}

void World::Run() {
  for (;;) {
    World& self = Get();  // another one after a reset
    Fiber* fiber = self.fiber_;
    fiber->body();
    fiber->body = nullptr;
    fiber->has_ended = true;
    self.Wake(fiber);
    fiber->stack->is_idle = true;
    if (_setjmp(fiber->stack->context) == 0) _longjmp(self.main_, 1);
  }
}

void World::SwitchOut() {
  if (_setjmp(fiber_->context) == 0) _longjmp(main_, 1);
}

void World::Resume(Fiber* fiber) {
  fiber_ = fiber;
  if (_setjmp(main_) == 0) Enter();
  Left();
}

void World::Left() {
  Fiber* fiber = std::exchange(fiber_, nullptr);
  if (!fiber->has_ended || fiber->stack == nullptr) return;
  free_stacks.push_back(std::exchange(fiber->stack, nullptr));
}

void World::MakeReady(Fiber* fiber) {
  fiber->waits_for = nullptr;
  Process& process = *processes_[fiber->process];
  if (process.is_dead) return;
  (process.is_frozen ? process.parked : ready_).push_back(fiber);
  next_ = 0;
}

bool World::Wait(const void* key, Time until) {
  Fiber* fiber = fiber_;
  if (fiber == nullptr) {
    std::fputs("simulation: a wait outside of a fiber\n", stderr);
    std::abort();
  }
  if (until <= now_) {
    Yield();
    return false;
  }
  fiber->waits_for = key;
  fiber->timed_out = false;
  const uint64_t wait = ++fiber->num_waits;
  waiting_[key].push_back(fiber);
  if (until != kNever) {
    At(until, [this, fiber, key, wait] {
      if (fiber->num_waits != wait || fiber->waits_for != key) return;
      const auto found = waiting_.find(key);
      if (found != waiting_.end()) std::erase(found->second, fiber);
      fiber->timed_out = true;
      MakeReady(fiber);
    });
  }
  SwitchOut();
  return !fiber->timed_out;
}

void World::Wake(const void* key, size_t limit) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  std::vector<Fiber*>& fibers = found->second;
  for (; limit > 0 && !fibers.empty(); --limit) {
    // Any of those that wait, as the system may choose.
    const size_t i = fibers.size() == 1 ? 0 : Random() % fibers.size();
    Fiber* fiber = fibers[i];
    fibers.erase(fibers.begin() + static_cast<ptrdiff_t>(i));
    MakeReady(fiber);
  }
  if (fibers.empty()) waiting_.erase(found);
}

void World::Yield() {
  if (fiber_ == nullptr) return;
  MakeReady(fiber_);
  SwitchOut();
}

void World::Watch(const void* object, size_t num_bytes) { watched_[object] = num_bytes; }

void World::MaybeYield(const void* mutex) {
  if (fiber_ == nullptr || watched_.empty()) return;
  auto after = watched_.upper_bound(mutex);
  if (after == watched_.begin()) return;
  --after;
  if (static_cast<const char*>(mutex) >= static_cast<const char*>(after->first) + after->second) {
    return;
  }
  if (!Chance(kYieldAtLock)) return;
  // At another moment, not only in another order: a pause of a thread.
  const Time until = now_ + Between(1'000, 2'000'000);
  Wait(&until, until);
}

void World::At(Time when, std::function<void()> event) {
  next_ = std::min(next_, when);
  events_.push_back({std::max(when, now_), ++num_events_, std::move(event)});
  std::push_heap(events_.begin(), events_.end());
}

void World::AtProcess(int number, Time when, std::function<void()> event) {
  At(when, [this, number, event = std::move(event)]() mutable {
    Process& process = *processes_[number];
    if (process.is_dead) return;
    if (process.is_frozen) {
      process.inbox.push_back(std::move(event));
    } else {
      event();
    }
  });
}

Time World::NextTime() const {
  if (!ready_.empty()) return now_;
  return events_.empty() ? kNever : std::max(now_, events_.front().when);
}

void World::Step() {
  ++num_steps_;
  if (!ready_.empty()) {
    const size_t i = ready_.size() == 1 ? 0 : Random() % ready_.size();
    Fiber* fiber = std::exchange(ready_[i], ready_.back());
    ready_.pop_back();
    return Resume(fiber);
  }
  if (events_.empty()) return;
  std::pop_heap(events_.begin(), events_.end());
  Event event = std::move(events_.back());
  events_.pop_back();
  now_ = std::max(now_, event.when);
  event.run();
}

}  // namespace persia::simulation

// ThreadPool: divides one loop at a time among a fixed number of threads, the caller's included.
//
// Threads sleep between loops, so that they do not compete with those of torch, which work when
// these do not. One loop at a time: callers see to it themselves. In a forked process there are no
// threads: a pool may be destroyed there, not used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace persia {

class ThreadPool {
 public:
  // `num_threads` counts the caller's: 1 starts none.
  // At least 1. The threads start here and live as long as the pool, so that a loop costs two
  // wake-ups of a futex and no thread is made for it.
  explicit ThreadPool(uint32_t num_threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  // No loop may run. Waits for the threads, except in a forked child, where they do not exist.
  ~ThreadPool();

  uint32_t num_threads() const { return static_cast<uint32_t>(threads_.size()) + 1; }

  // Calls body(i) once for each i below `count`, in any order, on any thread; returns when all have
  // ended. What the caller wrote before, the bodies see; what they write, the caller sees after.
  // A body must not throw, and must not call For() of the same pool, which would wait for itself.
  // Bodies share the work by an atomic counter: large counts of tiny bodies cost more than they
  // gain.
  void For(size_t count, const std::function<void(size_t)>& body);

 private:
  void Work();
  void TakePart();

  // Of the loop in progress.
  // Written by For() before it raises round_, which orders these writes before the other threads'
  // reads.
  const std::function<void(size_t)>* body_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> num_working_{0};  // threads that have not left the loop yet

  std::atomic<uint32_t> round_{0};  // counts loops; threads sleep until it changes
  std::atomic<bool> is_ending_{false};
  const int process_;  // that the threads belong to
  std::vector<std::thread> threads_;
};

}  // namespace persia

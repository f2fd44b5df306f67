#include "base/thread_pool.h"

#include <unistd.h>

namespace persia {

ThreadPool::ThreadPool(uint32_t num_threads) : process_(getpid()) {
  for (uint32_t i = 1; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  if (getpid() != process_) {
    // In a forked child the threads do not exist, and joining what does not exist would wait for
    // ever.
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  is_ending_ = true;
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::For(size_t count, const std::function<void(size_t)>& body) {
  if (threads_.empty() || count <= 1) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  body_ = &body;
  count_ = count;
  next_ = 0;
  num_working_ = static_cast<uint32_t>(threads_.size());
  round_.fetch_add(1);
  round_.notify_all();
  TakePart();
  // Not until the work is done but until every thread has left the loop: the next For() overwrites
  // what they read.
  for (uint32_t left = num_working_; left != 0; left = num_working_) num_working_.wait(left);
}

void ThreadPool::TakePart() {
  for (size_t i = next_++; i < count_; i = next_++) (*body_)(i);
}

void ThreadPool::Work() {
  // Rounds count from 0, so that one that began before this thread did is not missed.
  for (uint32_t seen = 0;; ++seen) {
    round_.wait(seen);
    if (is_ending_) return;
    TakePart();
    if (num_working_.fetch_sub(1) == 1) num_working_.notify_all();
  }
}

}  // namespace persia

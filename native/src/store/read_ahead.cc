#include "store/read_ahead.h"

#include <algorithm>
#include <utility>

namespace persia::store {

void ReadAhead::Add(std::span<const uint64_t> signs) {
  {
    const std::lock_guard lock(mutex_);
    const size_t count = std::min(signs.size(), max_signs_ - num_waiting_);
    num_dropped_ += signs.size() - count;
    if (count == 0) return;
    waiting_.emplace_back(signs.begin(), signs.begin() + static_cast<std::ptrdiff_t>(count));
    num_waiting_ += count;
  }
  wake_.notify_one();
}

bool ReadAhead::Take(std::vector<uint64_t>* signs) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return is_stopping_ || !waiting_.empty(); });
  if (is_stopping_) return false;
  *signs = std::move(waiting_.front());
  waiting_.pop_front();
  num_waiting_ -= signs->size();
  return true;
}

void ReadAhead::Stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
}

uint64_t ReadAhead::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

uint64_t ReadAhead::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_waiting_ * sizeof(uint64_t);
}

}  // namespace persia::store

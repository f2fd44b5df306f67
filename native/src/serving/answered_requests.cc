#include "serving/answered_requests.h"

#include <array>
#include <utility>

namespace persia::serving {
namespace {

constexpr size_t kMaxWaiting = 64;  // each may have the size of a request

}  // namespace

void AnsweredRequests::Push(Answered answered) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || waiting_.size() >= kMaxWaiting) {
      ++num_dropped_;
      return;
    }
    waiting_.push_back(std::move(answered));
  }
  changed_.notify_one();
}

std::optional<StatusOr<std::vector<std::byte>>> AnsweredRequests::Next() {
  Answered next;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !waiting_.empty() || closed_; });
    if (waiting_.empty()) return std::nullopt;
    next = std::move(waiting_.front());
    waiting_.pop_front();
  }
  if (next.request == nullptr) return std::move(next.batch);
  const Samples& samples = next.request->samples();
  if (samples.is_batch) {
    const auto batch = samples.memory.span();
    return std::vector<std::byte>(batch.begin(), batch.end());
  }
  const std::array<const Samples*, 1> one = {&samples};
  return Merge(one);
}

void AnsweredRequests::Close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

uint64_t AnsweredRequests::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

}  // namespace persia::serving

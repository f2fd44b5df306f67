#include "serving/answered_requests.h"

#include <array>
#include <utility>

namespace persia::serving {

// Called by the thread that has just answered the request. It copies nothing: the samples are
// encoded by the thread that logs.
void AnsweredRequests::Offer(std::shared_ptr<const Samples> samples) {
  const uint64_t num_bytes = samples->memory_bytes();
  Push({std::move(samples), {}, num_bytes});
}

void AnsweredRequests::Offer(std::vector<std::byte> batch) {
  const uint64_t num_bytes = batch.size();
  Push({nullptr, std::move(batch), num_bytes});
}

bool AnsweredRequests::HasRoom() {
  const std::lock_guard lock(mutex_);
  return HasRoomLocked();
}

// The bytes are compared before the request is added, so that one request larger than the bound is
// logged, too.
bool AnsweredRequests::HasRoomLocked() {
  if (!closed_ && waiting_.size() < kMaxWaiting && waiting_bytes_ < max_bytes_) return true;
  ++num_dropped_;
  return false;
}

void AnsweredRequests::Push(Answered answered) {
  {
    const std::lock_guard lock(mutex_);
    if (!HasRoomLocked()) return;
    waiting_bytes_ += answered.num_bytes;
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
    waiting_bytes_ -= next.num_bytes;
  }
  // Encoded without the lock: requests of megabytes must not make Offer() wait.
  if (next.samples == nullptr) return std::move(next.batch);
  const Samples& samples = *next.samples;
  if (samples.is_batch) {
    const auto batch = samples.memory.span();
    return std::vector<std::byte>(batch.begin(), batch.end());
  }
  // Tensors by name have no bytes of a batch: one is made, as the log's readers know that form
  // alone.
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

// AnsweredRequests: requests of a share on their way to a thread that logs them. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "serving/draw.h"
#include "serving/request_queue.h"

namespace persia::serving {

class AnsweredRequests {
 public:
  explicit AnsweredRequests(std::shared_ptr<const Draw> draw) : draw_(std::move(draw)) {}
  AnsweredRequests(const AnsweredRequests&) = delete;

  const Draw& draw() const { return *draw_; }
  // Never waits: a request is dropped while as many as may wait do. The answer must have been sent.
  void Offer(std::shared_ptr<const Waiting> request) { Push({std::move(request), {}}); }
  void Offer(std::vector<std::byte> batch) { Push({nullptr, std::move(batch)}); }
  // Waits for a request; the bytes of its batch. None: closed, and none waits.
  std::optional<StatusOr<std::vector<std::byte>>> Next();
  // Next() still gives what waits.
  void Close();
  uint64_t num_dropped() const;

 private:
  struct Answered {
    std::shared_ptr<const Waiting> request;  // null: `batch` is it
    std::vector<std::byte> batch;
  };

  void Push(Answered answered);

  const std::shared_ptr<const Draw> draw_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Answered> waiting_;
  uint64_t num_dropped_ = 0;
  bool closed_ = false;
};

}  // namespace persia::serving

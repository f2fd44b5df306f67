// AnsweredRequests: requests of a share on their way to a thread that logs them. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "serving/draw.h"
#include "serving/samples.h"

namespace persia::serving {

class AnsweredRequests {
 public:
  static constexpr size_t kMaxWaiting = 64;
  static constexpr uint64_t kMaxWaitingBytes = uint64_t{64} << 20;

  // `max_bytes`: more are dropped. One request may exceed it.
  explicit AnsweredRequests(std::shared_ptr<const Draw> draw, uint64_t max_bytes = kMaxWaitingBytes)
      : draw_(std::move(draw)), max_bytes_(max_bytes) {}
  AnsweredRequests(const AnsweredRequests&) = delete;

  const Draw& draw() const { return *draw_; }
  // Never waits: a request is dropped while too many wait. It must have its answer. Keeps its
  // samples alone: a log that is behind must hold nothing else of a call.
  void Offer(std::shared_ptr<const Samples> samples);
  void Offer(std::vector<std::byte> batch);
  // False: what is offered now would be dropped, and is counted as if it was.
  bool HasRoom();
  // Waits for a request; the bytes of its batch. None: closed, and none waits.
  std::optional<StatusOr<std::vector<std::byte>>> Next();
  // Next() still gives what waits.
  void Close();
  uint64_t num_dropped() const;

 private:
  struct Answered {
    std::shared_ptr<const Samples> samples;  // null: `batch` is the request
    std::vector<std::byte> batch;
    uint64_t num_bytes = 0;
  };

  void Push(Answered answered);
  bool HasRoomLocked();

  const std::shared_ptr<const Draw> draw_;
  const uint64_t max_bytes_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Answered> waiting_;
  uint64_t waiting_bytes_ = 0;
  uint64_t num_dropped_ = 0;
  bool closed_ = false;
};

}  // namespace persia::serving

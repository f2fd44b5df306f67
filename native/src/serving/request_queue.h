// RequestQueue: requests that wait to be computed, and the batches that they become.
//
// While a batch is computed the next requests gather, so batches grow with the load. A request is
// refused at once if its answer would come after its deadline: a client can then ask another
// server.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "net/types.h"
#include "serving/infer_response.h"
#include "serving/request_counts.h"
#include "serving/samples.h"

namespace persia::serving {

using net::Clock;

// A request that waits. Exactly one of Answer and Fail is called, once, after it was submitted.
class Waiting {
 public:
  Waiting(Samples samples, Clock::time_point deadline)
      : samples_(std::make_shared<const Samples>(std::move(samples))), deadline_(deadline) {}
  virtual ~Waiting() = default;

  // With the outputs of its batch, where its samples begin at `begin`. From any thread.
  virtual void Answer(const Prediction& prediction, uint32_t begin) = 0;
  virtual void Fail(GrpcCode code, const std::string& message) = 0;
  // After all requests of a batch have been answered: what was to be sent may wait until then.
  virtual void Deliver() {}

  const Samples& samples() const { return *samples_; }
  // May outlive the request.
  const std::shared_ptr<const Samples>& shared_samples() const { return samples_; }
  uint32_t size() const { return samples_->size(); }
  Clock::time_point deadline() const { return deadline_; }
  // Its client waits no longer: it need not be computed. Thread-safe.
  void GiveUp() { given_up_.store(true, std::memory_order_relaxed); }
  bool given_up() const { return given_up_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<const Samples> samples_;
  const Clock::time_point deadline_;
  std::atomic<bool> given_up_ = false;
};

struct QueueOptions {
  uint32_t max_batch_size = 1024;         // samples in one batch, and in one request
  std::chrono::nanoseconds max_delay{0};  // how long the first request of a batch waits for others
  uint32_t max_queued = 512;              // requests that wait; more are refused
  uint32_t num_threads = 1;               // batches computed at a time
};

// How long batches took lately: a straight line, with a time for each batch and one for each
// sample. Not thread-safe.
class BatchTimes {
 public:
  void Add(uint32_t num_samples, double took_s);
  // Of so many batches with so many samples in all; 0: none was computed yet.
  double Estimate(uint64_t num_batches, uint64_t num_samples) const;

 private:
  // Of size, seconds, their product and the square of the size.
  std::array<double, 4> means_{};
  bool is_empty_ = true;
};

// Requests that were admitted and have not arrived yet. Each is counted for 50 to 100 ms: one of a
// client that sends slowly keeps no other request out for longer. Not thread-safe.
class Reservations {
 public:
  // Returns what Remove needs.
  int64_t Add(Clock::time_point now);
  void Remove(int64_t slice);
  uint32_t Count(Clock::time_point now) const;

 private:
  struct Slice {
    int64_t number = 0;  // of a slice of time
    uint32_t num = 0;    // of the reservations made in it
  };

  std::array<Slice, 2> slices_;
};

class RequestQueue;

// Requests of one layout that are computed together, in order. The thread that took it answers it,
// by one of Answer, Fail and Split. Not thread-safe.
class Batch {
 public:
  // `is_part`: of a batch that was split.
  Batch(std::vector<std::shared_ptr<Waiting>> requests, RequestQueue* queue, bool is_part = false);
  Batch(const Batch&) = delete;
  ~Batch();  // fails what was not answered

  const std::vector<std::shared_ptr<Waiting>>& requests() const { return requests_; }
  size_t num_requests() const { return requests_.size(); }
  uint32_t num_samples() const { return num_samples_; }
  bool is_part() const { return is_part_; }
  // See serving::Merge.
  StatusOr<std::vector<std::byte>> Message() const;
  // Each output must have a row for each sample. This, Fail and Split have no effect on a batch
  // that has ended.
  void Answer(const Prediction& prediction);
  void Fail(GrpcCode code, const std::string& message);
  // A batch of each request: the fault of one must not be the others'. They are to be computed one
  // after another. Neither they nor this one, which has failed, count for the estimates of the
  // queue.
  std::vector<std::unique_ptr<Batch>> Split();

 private:
  void End(bool is_computed);

  std::vector<std::shared_ptr<Waiting>> requests_;
  RequestQueue& queue_;
  uint32_t num_samples_ = 0;
  const bool is_part_;
  const Clock::time_point began_ = Clock::now();
};

// Thread-safe. Must outlive its batches.
class RequestQueue {
 public:
  // That a request will have. Others are admitted as if it waited already. Movable; must not
  // outlive the queue.
  class Place {
   public:
    Place() = default;
    Place(RequestQueue* queue, int64_t slice) : queue_(queue), slice_(slice) {}
    Place(Place&& other) noexcept { *this = std::move(other); }
    Place& operator=(Place&& other) noexcept {
      std::swap(queue_, other.queue_);
      std::swap(slice_, other.slice_);
      return *this;
    }
    ~Place() {
      if (queue_ != nullptr) queue_->GiveBack(slice_);
    }

   private:
    RequestQueue* queue_ = nullptr;
    int64_t slice_ = 0;
  };

  explicit RequestQueue(const QueueOptions& options) : options_(options) {}
  RequestQueue(const RequestQueue&) = delete;

  // kInvalidArgument: more samples than a batch may have. kResourceExhausted: the queue is full, or
  // so long that the deadline would pass before the answer. kUnavailable: it is closed. Neither
  // Answer nor Fail is called then. Ends no other request: that may need locks of Python, for which
  // the network's thread must not wait.
  Status Submit(std::shared_ptr<Waiting> request);
  // Before its message has arrived, which tells its size. kResourceExhausted: the requests ahead
  // would take too long, those with a reservation among them, or are too many.
  StatusOr<Place> Admit(Clock::time_point deadline);
  // Waits for requests; null once it is closed and empty. Requests whose time has passed are
  // failed.
  std::unique_ptr<Batch> Next();
  // Next() still gives what waits.
  void Close();
  uint32_t num_waiting() const;  // whose batch has not begun
  uint32_t num_running() const;  // whose batch is being computed

 private:
  friend class Batch;
  using Requests = std::vector<std::shared_ptr<Waiting>>;

  Status AdmitLocked(Clock::time_point deadline, uint32_t num_samples,
                     uint32_t num_reserved = 0) const;
  double EstimateLocked(uint32_t num_samples, Clock::time_point now) const;
  void GiveBack(int64_t slice);
  void DropLate(Requests* late);
  Requests Take();
  void Begin(const Batch& batch);
  void End(const Batch& batch, std::optional<Clock::duration> took);

  const QueueOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Waiting>> waiting_;
  uint64_t num_samples_ = 0;  // of the requests that wait
  double usual_samples_ = 0;  // of a request, lately
  double least_samples_ = 0;  // of a small one, lately
  Reservations reservations_;
  uint32_t num_running_ = 0;  // requests
  uint64_t running_samples_ = 0;
  uint32_t num_parts_ = 0;   // of batches that were split, not computed yet
  Clock::time_point began_;  // the batch that began last
  bool closed_ = false;
  BatchTimes times_;
};

}  // namespace persia::serving

// BatchBuffer: the batches an embedding worker holds, and what became of the recent ones.
//
//   Register -> waiting -> StartLookup -> in flight -> FinishReturn (returned) or Release (released)
//                  \-> expired (a full buffer)  \-> expired (too many in flight)
//
// Counters begin at 1 and are never reused. At any moment
//   registered = returned + released + expired + waiting + in flight.
//
// Thread-safe; one mutex, under which nothing slow happens. What is in flight is shared with the
// callers that work on it, so that a batch that expires under their hands stays valid for them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "worker/batch_plan.h"
#include "worker/embedding_worker.h"
#include "worker/feature_batch.h"

namespace persia::worker {

// Which state of each server a lookup has seen.
struct LookupVersion {
  uint64_t incarnation = 0;
  uint64_t update_counter = 0;
};

// A batch whose embeddings were asked for.
struct InFlightBatch {
  std::mutex mutex;  // guards all members; held while the plan is made, never across a remote call
  std::optional<FeatureBatch> features;   // until the plan is made
  std::shared_ptr<const BatchPlan> plan;
  std::vector<LookupVersion> versions;    // by server, of the last training lookup; empty: none yet
};

class BatchBuffer {
 public:
  struct Options {
    uint64_t max_waiting_per_loader = 0;
    uint64_t max_waiting_bytes = 0;
    uint64_t max_in_flight = 0;
    std::chrono::steady_clock::duration expiry{};
  };
  struct Stats {
    uint64_t num_registered = 0, num_returned = 0, num_released = 0, num_expired = 0;
    uint64_t num_waiting = 0, num_in_flight = 0;
  };

  explicit BatchBuffer(const Options& options) : options_(options) {}

  // kResourceExhausted: full of batches that have not expired. kInvalidArgument: can never fit.
  StatusOr<uint64_t> Register(uint32_t loader_index, FeatureBatch features);
  // A batch that never waited, as one that is in flight from the start.
  StatusOr<uint64_t> RegisterInFlight(std::shared_ptr<InFlightBatch> batch);
  // Finds the batch in flight, or moves it there from the waiting ones.
  StatusOr<std::shared_ptr<InFlightBatch>> StartLookup(uint64_t counter);

  // A return either is the first (`batch` set: call FinishReturn), or was done before (`report` set).
  // One that finds another at work waits for it: kDeadlineExceeded when that takes too long.
  struct ReturnStart {
    std::shared_ptr<InFlightBatch> batch;
    ReturnReport report;
  };
  StatusOr<ReturnStart> StartReturn(uint64_t counter, std::chrono::steady_clock::time_point deadline);
  // Without a report the return has failed and the batch stays in flight, to be returned again.
  void FinishReturn(uint64_t counter, const std::optional<ReturnReport>& report);

  // Idempotent: a batch that is gone already is fine. A return at work is let finish.
  Status Release(uint64_t counter);

  Stats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Waiting {
    uint32_t loader_index = 0;
    Clock::time_point since;
    FeatureBatch features;
  };
  struct InFlight {
    std::shared_ptr<InFlightBatch> batch;
    Clock::time_point since;  // of the last lookup
    bool returning = false;
    bool release_requested = false;
  };

  bool HasRoom(uint32_t loader_index, uint64_t size_bytes) const;
  Status MakeRoomInFlight();
  void ExpireWaiting();
  std::map<uint64_t, Waiting>::iterator RemoveWaiting(std::map<uint64_t, Waiting>::iterator it);
  void Remember(uint64_t counter, const ReturnReport& report);
  Status UnknownReference(uint64_t counter) const;

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable return_finished_;
  uint64_t last_counter_ = 0;
  std::map<uint64_t, Waiting> waiting_;  // by counter, which is the order of age
  std::unordered_map<uint32_t, uint64_t> num_waiting_by_loader_;
  uint64_t waiting_bytes_ = 0;
  std::map<uint64_t, InFlight> in_flight_;
  std::unordered_map<uint64_t, ReturnReport> reports_;  // of the recent returns
  std::deque<uint64_t> report_order_;
  Stats totals_;  // num_waiting and num_in_flight are not kept here
};

}  // namespace persia::worker

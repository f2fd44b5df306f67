// BatchTable: the batches an embedding worker holds, from registration to the end, and their count.
//
// A batch is waiting (registered by a loader) or in flight (looked up, its gradients expected).
// Both are bounded. One request at a time may work on a batch: Acquire() returns its guard, and a
// repetition of the request waits for the first to finish. What became of a returned batch is
// remembered for a while, so that a repeated return gets the first answer.
//
// Invariant: registered = returned + released + expired + waiting + in flight.
// Thread-safe, except that a batch's working fields belong to the holder of its guard.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/metrics.h"
#include "base/status.h"
#include "worker/lookup_plan.h"
#include "worker/types.h"

namespace persia::worker {

// A lookup of some of a batch's slots.
struct SlotsLookup {
  SlotMask slots = 0;               // all bits set for all
  std::vector<LookupStamp> stamps;  // by server; incarnation 0 where it was not asked
};

// The stamp of the batch's first lookup on a server. It dates the update.
LookupStamp FirstStamp(std::span<const SlotsLookup> lookups, size_t server);
// Notes a lookup for training; of slots that were looked up before, the later lookup counts.
void NoteLookup(SlotMask slots, std::span<const ServerRows> answers,
                std::vector<SlotsLookup>* lookups);
// The slots that were looked up. The rank has the rows of others, and updates them.
SlotMask LookedUp(std::span<const SlotsLookup> lookups);

struct Batch {
  enum class State : uint8_t { kWaiting, kInFlight };

  // Working fields.
  std::optional<FeatureBatch> features;  // until the plan is made
  std::optional<LookupPlan> plan;
  std::vector<SlotsLookup> lookups;  // for training, the earliest first; no slot is in two
  BatchKey original;                 // at the worker that held it before; reference 0: none did

  // The table's.
  uint64_t counter = 0;
  uint32_t loader_index = 0;
  size_t num_bytes = 0;
  State state = State::kWaiting;
  bool busy = false;
  std::chrono::steady_clock::time_point since;
};

class BatchTable {
 public:
  // Batches and bytes that may be held. What is older than `expiry` is dropped when room is needed,
  // not before: a slow rank loses nothing while there is room.
  struct Options {
    uint64_t max_waiting_per_loader = 1000;
    uint64_t max_waiting_bytes = 4ull << 30;
    uint64_t max_in_flight = 4096;
    uint64_t max_remembered = 65536;
    std::chrono::seconds expiry{1000};
  };

  // Exclusive use of a batch until destroyed. Move-only.
  class Guard {
   public:
    Guard(BatchTable* table, std::shared_ptr<Batch> batch)
        : table_(table), batch_(std::move(batch)) {}
    Guard(Guard&&) = default;
    Guard& operator=(Guard&&) = delete;
    ~Guard() {
      if (batch_ != nullptr) table_->EndUse(*batch_);
    }
    Batch* operator->() const { return batch_.get(); }
    Batch& operator*() const { return *batch_; }

   private:
    BatchTable* table_;
    std::shared_ptr<Batch> batch_;
  };

  explicit BatchTable(const Options& options) : options_(options) {}

  // Returns the batch's counter. kResourceExhausted: the loader's share or the bytes are used up,
  // also after what is too old was dropped.
  StatusOr<uint64_t> AddWaiting(uint32_t loader_index, FeatureBatch features);
  // A batch that skips waiting, held by the guard. kResourceExhausted: too many in flight.
  StatusOr<Guard> AddInFlight(FeatureBatch features);

  // kNotFound: gone, or never there. kDeadlineExceeded: another request works on it.
  StatusOr<Guard> Acquire(uint64_t counter, Deadline deadline);

  // Waits until the batch is returned; 0 is none. kNotFound: it ended otherwise. kUnavailable: it
  // is not returned yet.
  Status WaitReturned(uint64_t counter, Deadline deadline);

  // Waits until the requests that work on a batch now have ended. kDeadlineExceeded: some have not.
  Status AwaitRequests(Deadline deadline);

  // Acquires the oldest waiting batch that this has not returned before. Nothing if `limit` of
  // those that it returned still wait for their lookup. One that a later batch has overtaken does
  // not count as waiting: its rank may have been killed and never ask for it.
  std::optional<Guard> NextToPrefetch(uint64_t limit);

  // kResourceExhausted: too many in flight; the batch stays waiting then.
  Status StartFlight(const Guard& guard);
  void FinishReturned(const Guard& guard, const ReturnReport& report);
  void FinishReleased(const Guard& guard);
  // Releases the waiting batches that no request works on; returns their number.
  uint64_t ReleaseWaiting();

  // The report of a batch that was returned not long ago.
  std::optional<ReturnReport> FindReturned(uint64_t counter) const;
  // Whether the counter was ever given out.
  bool WasIssued(uint64_t counter) const;

  // Adds the life-cycle counts, as they are at one moment.
  void AddMetrics(Metrics* metrics) const;

 private:
  using Batches = std::map<uint64_t, std::shared_ptr<Batch>>;  // oldest first

  void EndUse(Batch& batch);
  std::shared_ptr<Batch> MakeLocked(FeatureBatch features, Batch::State state);
  bool MustWaitLocked(uint32_t loader_index, size_t num_bytes) const;
  Status MakeRoomInFlightLocked();
  // Removes the batches in that state that are too old and not being worked on.
  void ExpireLocked(Batch::State state);
  // Removes those that no request works on, and returns them.
  std::vector<std::shared_ptr<Batch>> RemoveSinceLocked(Batch::State state,
                                                        std::chrono::steady_clock::time_point last);
  void RemoveLocked(const Batch& batch);
  void LeaveWaitingLocked(const Batch& batch);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable batch_free_;
  Batches batches_;
  std::unordered_map<uint32_t, uint64_t> num_waiting_;  // by loader
  uint64_t total_waiting_ = 0;
  uint64_t waiting_bytes_ = 0;
  uint64_t num_in_flight_ = 0;
  std::set<uint64_t> ahead_;   // returned by NextToPrefetch, and still waiting
  uint64_t newest_left_ = 0;   // of the batches that have left waiting
  uint64_t next_ahead_ = 0;    // all before it were returned, or had left
  uint64_t next_counter_ = 1;  // 0 means no reference
  std::unordered_map<uint64_t, ReturnReport> returned_;
  std::deque<uint64_t> returned_order_;
  uint64_t num_returned_ = 0;
  uint64_t num_released_ = 0;
  uint64_t num_expired_ = 0;
};

}  // namespace persia::worker

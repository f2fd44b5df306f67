// DurationStats: how long one phase of the work takes, counted since the process started.
//
// A histogram, the sum, and the last value. Recording is a few relaxed atomic
// operations and takes no lock; phases are recorded once a request or batch, never once a row.
// A snapshot may be taken at any time: each number in it is exact, but a recording that runs at the
// same moment may be in some of them only. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "base/trace_buffer.h"

namespace persia {

// Some 700 bytes, for a handful of phases a role: not for objects of which there are many.
class DurationStats {
 public:
  // The monotonic clock, which time adjustments of the host do not move.
  using TimePoint = std::chrono::steady_clock::time_point;

  // Bounds from 1.024 us to 69 s, three to a doubling: each is 1.26 times the one before. Bucket i
  // holds the durations below bound i that fit no earlier bucket; the last bucket holds the rest.
  static constexpr size_t kNumDoublings = 26;
  static constexpr size_t kNumBuckets = 3 * kNumDoublings + 2;

  struct Snapshot {
    std::array<uint64_t, kNumBuckets> counts{};
    // Of all recordings, in nanoseconds: 584 years fit.
    uint64_t sum_ns = 0;
    // The recording that ended last, which the gauges of the published system show.
    uint64_t last_ns = 0;
  };

  // `name` appears in traces and in metrics.
  // Exporters and traces keep a pointer to the object and a view of its name, so a role declares
  // these as members, and they live as long as it does.
  explicit DurationStats(std::string name) : name_(std::move(name)) {}
  DurationStats(const DurationStats&) = delete;

  const std::string& name() const { return name_; }
  // Exclusive. Of the last bucket it means nothing: that one has no bound.
  static constexpr uint64_t UpperBoundNs(size_t bucket) {
    return kSteps[bucket % 3] << (bucket / 3);
  }

  // Measuring can be turned off for the whole process, which leaves one relaxed load of a phase.
  static void Enable(bool enabled) { enabled_.store(enabled, std::memory_order_relaxed); }
  // Whether work that only measuring needs is worth doing.
  static bool enabled() { return enabled_.load(std::memory_order_relaxed); }

  // An end before its begin counts as 0. `reference` and `batch_id` go into the trace alone, where
  // they join the spans of one batch across processes; 0 and kNoBatch mean that none is known.
  void Record(TimePoint begin, TimePoint end, uint64_t reference = 0,
              uint64_t batch_id = TraceSpan::kNoBatch);
  // A copy of the numbers as they are now.
  Snapshot snapshot() const;

 private:
  // 1024 times 2^0, 2^(1/3), 2^(2/3).
  static constexpr std::array<uint64_t, 3> kSteps{1024, 1290, 1625};
  static size_t BucketOf(uint64_t ns);

  // Relaxed: a phase that began before the switch may still be recorded after it.
  static inline std::atomic<bool> enabled_{true};

  const std::string name_;
  std::array<std::atomic<uint64_t>, kNumBuckets> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
  std::atomic<uint64_t> last_ns_{0};
};

// Records the time from its construction to its end, for the batch that this thread works for.
// Costs two readings of the clock, some 50 ns: for requests and batches. Not thread-safe; it lives
// on one thread's stack.
class Timed {
 public:
  // Whether it records is decided here: switching measurement on between begin and end must not
  // record a span that begins at the epoch.
  explicit Timed(DurationStats& stats, uint64_t reference = 0)
      : stats_(DurationStats::enabled() ? &stats : nullptr), reference_(reference) {
    if (stats_ != nullptr) begin_ = std::chrono::steady_clock::now();
  }
  Timed(const Timed&) = delete;
  ~Timed() {
    if (stats_ == nullptr) return;
    stats_->Record(begin_, std::chrono::steady_clock::now(), reference_,
                   TracedBatch::IdOf(TracedBatch::tag()));
  }
  // For batches that get their number on the way.
  void set_reference(uint64_t reference) { reference_ = reference; }

 private:
  DurationStats* const stats_;
  uint64_t reference_;
  DurationStats::TimePoint begin_;
};

}  // namespace persia

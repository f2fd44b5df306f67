// DurationStats: how long one phase of the work takes, counted since the process started.
//
// A histogram in powers of two, the sum, and the last value. Recording is a few relaxed atomic
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

class DurationStats {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Bucket i holds what takes less than 1.024 us * 2^i and fits no earlier one; the last holds the
  // rest, from 69 s on.
  static constexpr size_t kNumBuckets = 28;

  struct Snapshot {
    std::array<uint64_t, kNumBuckets> counts{};
    uint64_t sum_ns = 0;
    uint64_t last_ns = 0;
  };

  // `name` appears in traces and in metrics.
  explicit DurationStats(std::string name) : name_(std::move(name)) {}
  DurationStats(const DurationStats&) = delete;

  const std::string& name() const { return name_; }
  static uint64_t UpperBoundNs(size_t bucket) { return uint64_t{1024} << bucket; }

  // Measuring can be turned off for the whole process, which leaves one relaxed load of a phase.
  static void Enable(bool enabled) { enabled_.store(enabled, std::memory_order_relaxed); }
  static bool enabled() { return enabled_.load(std::memory_order_relaxed); }

  void Record(TimePoint begin, TimePoint end, uint64_t reference = 0,
              uint64_t batch_id = TraceSpan::kNoBatch);
  Snapshot snapshot() const;

 private:
  static inline std::atomic<bool> enabled_{true};

  const std::string name_;
  std::array<std::atomic<uint64_t>, kNumBuckets> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
  std::atomic<uint64_t> last_ns_{0};
};

// Records the time from its construction to its end, for the batch that this thread works for.
class Timed {
 public:
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

#include "base/duration_stats.h"

#include <algorithm>
#include <bit>

namespace persia {

size_t DurationStats::BucketOf(uint64_t ns) {
  if (ns < kSteps[0]) return 0;
  const auto doublings = static_cast<size_t>(std::bit_width(ns) - std::bit_width(kSteps[0]));
  const uint64_t scaled = ns >> doublings;  // from 1024 to 2047
  const size_t bucket = 3 * doublings + 1 + (scaled >= kSteps[1]) + (scaled >= kSteps[2]);
  return std::min(bucket, kNumBuckets - 1);
}

void DurationStats::Record(TimePoint begin, TimePoint end, uint64_t reference, uint64_t batch_id) {
  if (!enabled()) return;
  const auto elapsed = std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
  const auto ns = static_cast<uint64_t>(std::max<int64_t>(elapsed, 0));
  // Relaxed: nothing is ordered by these numbers, and a scrape need not see the three of one
  // recording together.
  counts_[BucketOf(ns)].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(ns, std::memory_order_relaxed);
  last_ns_.store(ns, std::memory_order_relaxed);
  TraceBuffer& trace = TraceBuffer::Global();
  if (trace.on()) trace.Add(name_, begin, end, reference, batch_id);
}

DurationStats::Snapshot DurationStats::snapshot() const {
  Snapshot snapshot;
  for (size_t i = 0; i < kNumBuckets; ++i) {
    snapshot.counts[i] = counts_[i].load(std::memory_order_relaxed);
  }
  snapshot.sum_ns = sum_ns_.load(std::memory_order_relaxed);
  snapshot.last_ns = last_ns_.load(std::memory_order_relaxed);
  return snapshot;
}

}  // namespace persia

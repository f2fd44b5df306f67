#include "base/duration_stats.h"

#include <algorithm>
#include <bit>

namespace persia {
namespace {

// floor(log2(ns)) - 9: below 2^10 the first, then one for each doubling.
size_t BucketOf(uint64_t ns) {
  const int doublings = std::bit_width(ns) - 10;
  return std::min<size_t>(static_cast<size_t>(std::max(doublings, 0)),
                          DurationStats::kNumBuckets - 1);
}

}  // namespace

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

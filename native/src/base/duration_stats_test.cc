#include "base/duration_stats.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/metrics.h"

namespace persia {
namespace {

using std::chrono::nanoseconds;

const DurationStats::TimePoint kBegin{nanoseconds(1'000'000)};

uint64_t NumRecorded(const DurationStats& stats) {
  const auto counts = stats.snapshot().counts;
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

TEST(DurationStats, APhaseIsCountedBelowTheFirstBoundAboveIt) {
  for (size_t bucket = 0; bucket + 1 < DurationStats::kNumBuckets; ++bucket) {
    DurationStats stats("phase");
    const uint64_t bound = DurationStats::UpperBoundNs(bucket);
    stats.Record(kBegin, kBegin + nanoseconds(bound - 1));
    stats.Record(kBegin, kBegin + nanoseconds(bound));
    const auto snapshot = stats.snapshot();
    EXPECT_EQ(snapshot.counts[bucket], 1u) << bucket;
    EXPECT_EQ(snapshot.counts[bucket + 1], 1u) << bucket;
    EXPECT_EQ(snapshot.sum_ns, 2 * bound - 1);
    EXPECT_EQ(snapshot.last_ns, bound);
  }
}

TEST(DurationStats, ABoundIsAtMost1Point3TimesTheOneBefore) {
  for (size_t bucket = 1; bucket + 1 < DurationStats::kNumBuckets; ++bucket) {
    const uint64_t before = DurationStats::UpperBoundNs(bucket - 1);
    EXPECT_GT(DurationStats::UpperBoundNs(bucket), before) << bucket;
    EXPECT_LE(DurationStats::UpperBoundNs(bucket) * 10, before * 13) << bucket;
  }
  EXPECT_EQ(DurationStats::UpperBoundNs(0), 1024u);
  EXPECT_EQ(DurationStats::UpperBoundNs(DurationStats::kNumBuckets - 2), uint64_t{1024} << 26);
}

TEST(DurationStats, NothingAndAVeryLongTimeHaveTheirPlace) {
  DurationStats stats("phase");
  stats.Record(kBegin, kBegin);
  stats.Record(kBegin,
               kBegin - nanoseconds(5));  // a clock never does that; it must not wrap around
  stats.Record(kBegin, kBegin + std::chrono::hours(1000));
  EXPECT_EQ(stats.snapshot().counts.front(), 2u);
  EXPECT_EQ(stats.snapshot().counts.back(), 1u);
}

TEST(DurationStats, ThreadsLoseNothing) {
  DurationStats stats("phase");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 1000; ++n) stats.Record(kBegin, kBegin + nanoseconds(1024));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(NumRecorded(stats), 4000u);
  EXPECT_EQ(stats.snapshot().sum_ns, 4000u * 1024);
}

TEST(DurationStats, TurnedOffItRecordsNothing) {
  DurationStats stats("phase");
  DurationStats::Enable(false);
  {
    const Timed timed(stats);
  }
  stats.Record(kBegin, kBegin);
  DurationStats::Enable(true);
  EXPECT_EQ(NumRecorded(stats), 0u);
  {
    const Timed timed(stats);
  }
  EXPECT_EQ(NumRecorded(stats), 1u);
}

TEST(TraceBuffer, ASpanHasNameTimesBatchAndThread) {
  DurationStats stats("a name that is longer than a span has room for");
  stats.Record(kBegin, kBegin + nanoseconds(7));  // before the trace
  TraceBuffer::Global().Start(10);
  stats.Record(kBegin, kBegin + nanoseconds(7), 42, 43);
  const auto recording = TraceBuffer::Global().Stop();
  ASSERT_EQ(recording.spans.size(), 1u);
  const TraceSpan& span = recording.spans[0];
  EXPECT_EQ(std::string(span.name.data()), stats.name().substr(0, 31));
  EXPECT_EQ(span.begin_ns, 1'000'000u);
  EXPECT_EQ(span.end_ns, 1'000'007u);
  EXPECT_EQ(span.reference, 42u);
  EXPECT_EQ(span.batch_id, 43u);
  EXPECT_NE(span.thread_id, 0u);
  EXPECT_TRUE(TraceBuffer::Global().Stop().spans.empty());
}

TEST(TraceBuffer, WhatDoesNotFitIsCounted) {
  DurationStats stats("phase");
  TraceBuffer::Global().Start(3);
  for (int i = 0; i < 5; ++i) stats.Record(kBegin, kBegin);
  const auto recording = TraceBuffer::Global().Stop();
  EXPECT_EQ(recording.spans.size(), 3u);
  EXPECT_EQ(recording.num_dropped, 2u);
}

TEST(TraceBuffer, MayBeStartedAndStoppedWhileThreadsRecord) {
  DurationStats stats("phase");
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!done) stats.Record(kBegin, kBegin + nanoseconds(7));
    });
  }
  for (int round = 0; round < 200; ++round) {
    TraceBuffer::Global().Start(64);
    std::this_thread::yield();
    for (const TraceSpan& span : TraceBuffer::Global().Stop().spans) {
      ASSERT_EQ(span.end_ns - span.begin_ns, 7u);
    }
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(Cardinality, EstimatesWithinAFewPercent) {
  for (const uint64_t size : {1u, 10u, 1000u, 10'000u, 20'000u, 1'000'000u}) {
    Cardinality cardinality;
    std::vector<uint64_t> numbers(size);
    std::iota(numbers.begin(), numbers.end(), uint64_t{77} << 40);
    cardinality.Add(numbers);
    cardinality.Add(numbers);  // again: nothing new
    EXPECT_NEAR(cardinality.Estimate(), static_cast<double>(size),
                std::max(0.5, 0.06 * static_cast<double>(size)));
  }
  EXPECT_EQ(Cardinality().Estimate(), 0.0);
}

}  // namespace
}  // namespace persia

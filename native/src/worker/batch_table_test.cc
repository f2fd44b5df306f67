// The batches of a worker: bounds, guards, expiry, and that none is ever lost from the count.
#include "worker/batch_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

Deadline Soon() { return steady_clock::now() + std::chrono::milliseconds(20); }
Deadline Late() { return steady_clock::now() + seconds(60); }

Metrics StatsOf(const BatchTable& table) {
  Metrics stats;
  table.AddMetrics(&stats);
  return stats;
}

uint64_t NumAccountedFor(const Metrics& stats) {
  return stats["num_returned"] + stats["num_released"] + stats["num_expired"] +
         stats["num_buffered"] + stats["num_in_flight"];
}

// Registers a batch without bytes.
uint64_t Add(BatchTable& table, uint32_t loader_index = 0) {
  const auto counter = table.AddWaiting(loader_index, FeatureBatch());
  EXPECT_TRUE(counter.ok()) << counter.status().ToString();
  return counter.value();
}

BatchTable::Guard Take(BatchTable& table, uint64_t counter) {
  auto guard = table.Acquire(counter, Late());
  EXPECT_TRUE(guard.ok()) << guard.status().ToString();
  return std::move(guard).value();
}

TEST(BatchTableTest, LifeOfABatch) {
  BatchTable table({});
  const uint64_t counter = Add(table);
  EXPECT_EQ(StatsOf(table)["num_buffered"], 1u);
  {
    const BatchTable::Guard guard = Take(table, counter);
    ASSERT_TRUE(table.StartFlight(guard).ok());
    ASSERT_TRUE(table.StartFlight(guard).ok());  // a repeated lookup
    EXPECT_EQ(StatsOf(table)["num_in_flight"], 1u);
    EXPECT_EQ(StatsOf(table)["num_buffered"], 0u);
    table.FinishReturned(guard, {.update = {}, .num_skipped_slots = 3});
  }
  const Metrics stats = StatsOf(table);
  EXPECT_EQ(stats["num_returned"], 1u);
  EXPECT_EQ(stats["num_in_flight"], 0u);
  EXPECT_EQ(NumAccountedFor(stats), stats["num_registered"]);
  EXPECT_EQ(table.Acquire(counter, Late()).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(table.FindReturned(counter)->num_skipped_slots, 3u);
  EXPECT_TRUE(table.WasIssued(counter));
}

TEST(BatchTableTest, GivesOutTheNextWaitingBatchesAheadOnceEach) {
  BatchTable table({});
  const uint64_t first = Add(table), second = Add(table), third = Add(table);
  EXPECT_EQ((*table.NextToPrefetch(2))->counter, first);
  {
    const BatchTable::Guard busy = Take(table, second);  // is being looked up
    EXPECT_EQ((*table.NextToPrefetch(2))->counter, third);
    EXPECT_FALSE(table.NextToPrefetch(2).has_value());
    ASSERT_TRUE(table.StartFlight(busy).ok());
  }
  EXPECT_FALSE(table.NextToPrefetch(3).has_value());  // no others wait
  ASSERT_TRUE(table.StartFlight(Take(table, first)).ok());
  const uint64_t fourth = Add(table);
  EXPECT_EQ((*table.NextToPrefetch(2))->counter, fourth);
  Add(table);
  EXPECT_FALSE(table.NextToPrefetch(2).has_value());
  table.FinishReleased(Take(table, third));
  EXPECT_TRUE(table.NextToPrefetch(2).has_value());
}

TEST(BatchTableTest, BatchesThatNobodyAsksForDoNotEndTheGivingOut) {
  BatchTable table({});
  const uint64_t lost = Add(table);
  const uint64_t next = Add(table), last = Add(table);
  EXPECT_EQ((*table.NextToPrefetch(1))->counter, lost);
  EXPECT_FALSE(table.NextToPrefetch(1).has_value());
  ASSERT_TRUE(table.StartFlight(Take(table, next)).ok());
  EXPECT_EQ((*table.NextToPrefetch(1))->counter, last);
  EXPECT_FALSE(table.NextToPrefetch(1).has_value());
}

TEST(BatchTableTest, KnowsWhatItNeverGaveOut) {
  BatchTable table({});
  const uint64_t counter = Add(table);
  EXPECT_TRUE(table.WasIssued(counter));
  EXPECT_FALSE(table.WasIssued(counter + 1));
  EXPECT_FALSE(table.WasIssued(0));
  EXPECT_EQ(table.Acquire(counter + 1, Late()).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(table.FindReturned(counter).has_value());
}

TEST(BatchTableTest, WaitingBatchesAreBoundedForEachLoader) {
  BatchTable table({.max_waiting_per_loader = 2});
  Add(table, 0);
  const uint64_t second = Add(table, 0);
  const auto third = table.AddWaiting(0, FeatureBatch());
  EXPECT_EQ(third.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(third.status().message().find("data loader 0"), std::string::npos);
  Add(table, 1);  // another loader's share
  table.FinishReleased(Take(table, second));
  Add(table, 0);
  EXPECT_EQ(StatsOf(table)["num_registered"], 4u);  // a refused batch is none
}

TEST(BatchTableTest, WaitingBytesAreBoundedForAllLoaders) {
  const SlotTable slots = MakeSlots({{.name = "a", .dim = 1}});
  const auto batch = [&] { return MakeBatch({{"a", {{1, 2, 3}}}}, slots); };
  BatchTable table({.max_waiting_bytes = 2 * batch().size_bytes()});
  const auto first = table.AddWaiting(0, batch());
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(table.AddWaiting(1, batch()).ok());
  EXPECT_EQ(table.AddWaiting(2, batch()).status().code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(table.StartFlight(Take(table, first.value())).ok());  // waits no longer
  EXPECT_TRUE(table.AddWaiting(2, batch()).ok());
}

TEST(BatchTableTest, BatchAboveTheBytesGoesAlone) {
  const SlotTable slots = MakeSlots({{.name = "a", .dim = 1}});
  const auto batch = [&] { return MakeBatch({{"a", {{1, 2, 3}}}}, slots); };
  BatchTable table({.max_waiting_bytes = 1});
  EXPECT_TRUE(table.AddWaiting(0, batch()).ok());
  EXPECT_EQ(table.AddWaiting(0, batch()).status().code(), StatusCode::kResourceExhausted);
}

TEST(BatchTableTest, BatchesInFlightAreBounded) {
  BatchTable table({.max_in_flight = 1});
  const uint64_t waiting = Add(table);
  auto direct = table.AddInFlight(FeatureBatch());
  ASSERT_TRUE(direct.ok());
  const BatchTable::Guard guard = Take(table, waiting);
  EXPECT_EQ(table.StartFlight(guard).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(table.AddInFlight(FeatureBatch()).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(StatsOf(table)["num_buffered"], 1u);  // still waiting, for a repetition
  table.FinishReleased(*direct);
  EXPECT_TRUE(table.StartFlight(guard).ok());
}

// Old batches go when their room is needed, and not before.
// In the published system, what waits for gradients never went.
TEST(BatchTableTest, Bug17AbandonedBatchesMakeRoom) {
  BatchTable table({.max_waiting_per_loader = 2, .max_in_flight = 1, .expiry = seconds(0)});
  Add(table);
  Add(table);
  EXPECT_EQ(StatsOf(table)["num_expired"], 0u);
  const uint64_t third = Add(table);
  EXPECT_EQ(StatsOf(table)["num_expired"], 2u);
  ASSERT_TRUE(table.StartFlight(Take(table, third)).ok());
  ASSERT_TRUE(table.AddInFlight(FeatureBatch()).ok());
  const Metrics stats = StatsOf(table);
  EXPECT_EQ(stats["num_expired"], 3u);
  EXPECT_EQ(NumAccountedFor(stats), stats["num_registered"]);
  EXPECT_EQ(table.Acquire(third, Late()).status().code(), StatusCode::kNotFound);
}

TEST(BatchTableTest, ReleasesWaitingBatchesThatNoRequestWorksOn) {
  BatchTable table({.max_waiting_per_loader = 4});
  const uint64_t in_flight = Add(table), busy = Add(table);
  ASSERT_TRUE(table.StartFlight(Take(table, in_flight)).ok());
  Add(table);
  const uint64_t last = Add(table);
  {
    const BatchTable::Guard guard = Take(table, busy);
    EXPECT_EQ(table.ReleaseWaiting(), 2u);
  }
  EXPECT_EQ(table.Acquire(last, Late()).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(table.Acquire(busy, Late()).ok());
  EXPECT_TRUE(table.Acquire(in_flight, Late()).ok());
  const Metrics stats = StatsOf(table);
  EXPECT_EQ(stats["num_released"], 2u);
  EXPECT_EQ(stats["num_buffered"], 1u);
  EXPECT_EQ(NumAccountedFor(stats), stats["num_registered"]);
}

TEST(BatchTableTest, BatchInUseDoesNotExpire) {
  BatchTable table({.max_waiting_per_loader = 1, .expiry = seconds(0)});
  const BatchTable::Guard guard = Take(table, Add(table));
  EXPECT_EQ(table.AddWaiting(0, FeatureBatch()).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(StatsOf(table)["num_expired"], 0u);
}

TEST(BatchTableTest, YoungBatchesDoNotExpire) {
  BatchTable table({.max_waiting_per_loader = 1, .expiry = seconds(1000)});
  Add(table);
  EXPECT_EQ(table.AddWaiting(0, FeatureBatch()).status().code(), StatusCode::kResourceExhausted);
}

TEST(BatchTableTest, GuardExcludesOthersUntilTheDeadline) {
  BatchTable table({});
  const uint64_t counter = Add(table);
  {
    const BatchTable::Guard guard = Take(table, counter);
    EXPECT_EQ(table.Acquire(counter, Soon()).status().code(), StatusCode::kDeadlineExceeded);
    EXPECT_EQ(table.Acquire(counter, steady_clock::now() - seconds(1)).status().code(),
              StatusCode::kDeadlineExceeded);
  }
  EXPECT_TRUE(table.Acquire(counter, steady_clock::now() - seconds(1)).ok());  // need not wait
}

TEST(BatchTableTest, WaiterGetsTheBatchOrHearsThatItIsGone) {
  for (const bool gone : {false, true}) {
    BatchTable table({});
    const uint64_t counter = Add(table);
    std::future<StatusCode> waiter;
    {
      const BatchTable::Guard guard = Take(table, counter);
      waiter = std::async(std::launch::async,
                          [&] { return table.Acquire(counter, Late()).status().code(); });
      if (gone) table.FinishReleased(guard);
    }
    EXPECT_EQ(waiter.get(), gone ? StatusCode::kNotFound : StatusCode::kOk);
  }
}

// A thread that waited until the deadline of minutes would be missing for other requests.
TEST(BatchTableTest, AnUpdateWaitsShortlyForTheOneBeforeIt) {
  BatchTable table({});
  const uint64_t counter = Add(table);
  EXPECT_TRUE(table.WaitReturned(0, Late()).ok());
  {
    const BatchTable::Guard guard = Take(table, counter);
    ASSERT_TRUE(table.StartFlight(guard).ok());
    EXPECT_EQ(table.WaitReturned(counter, Late()).code(), StatusCode::kUnavailable);
    table.FinishReturned(guard, {});
  }
  EXPECT_TRUE(table.WaitReturned(counter, Late()).ok());
  EXPECT_EQ(table.WaitReturned(counter + 1, Late()).code(), StatusCode::kNotFound);
}

TEST(BatchTableTest, RemembersTheLatestReturns) {
  BatchTable table({.max_remembered = 2});
  std::vector<uint64_t> counters;
  for (uint32_t i = 0; i < 3; ++i) {
    counters.push_back(Add(table));
    table.FinishReturned(Take(table, counters.back()), {.update = {}, .num_nonfinite_slots = i});
  }
  EXPECT_FALSE(table.FindReturned(counters[0]).has_value());
  EXPECT_EQ(table.FindReturned(counters[1])->num_nonfinite_slots, 1u);
  EXPECT_EQ(table.FindReturned(counters[2])->num_nonfinite_slots, 2u);
}

// Takes batches of any thread's through a random part of their lives.
void Work(BatchTable& table, uint32_t seed, std::vector<std::atomic<int>>& num_holders) {
  std::mt19937 rng(seed);
  for (int i = 0; i < 3000; ++i) {
    if (rng() % 3 == 0) (void)table.AddWaiting(rng() % 2, FeatureBatch());
    const uint64_t issued = StatsOf(table)["num_registered"];
    if (issued == 0) continue;
    const uint64_t counter = issued - std::min<uint64_t>(issued - 1, rng() % 8);
    auto guard = table.Acquire(counter, Late());
    if (!guard.ok()) continue;
    std::atomic<int>& holders = num_holders[counter % num_holders.size()];
    EXPECT_EQ(holders.fetch_add(1), 0) << "two hold batch " << counter;
    const bool flying = table.StartFlight(*guard).ok();
    const uint32_t end = rng() % 4;
    holders.fetch_sub(1);
    if (end == 0 && flying) table.FinishReturned(*guard, {});
    if (end == 1) table.FinishReleased(*guard);
  }
}

TEST(BatchTableTest, RequestsInProgressAreAwaited) {
  BatchTable table({});
  std::optional<BatchTable::Guard> update(Take(table, Add(table)));
  Add(table);  // no request works on it
  EXPECT_EQ(table.AwaitRequests(Soon()).code(), StatusCode::kDeadlineExceeded);
  auto waited = std::async([&] { return table.AwaitRequests(Late()); });
  EXPECT_EQ(waited.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  update.reset();
  EXPECT_TRUE(waited.get().ok());
}

TEST(BatchTableTest, NoBatchIsLostUnderConcurrentUse) {
  BatchTable table({.max_waiting_per_loader = 20, .max_in_flight = 10, .expiry = seconds(0)});
  std::vector<std::atomic<int>> num_holders(1 << 16);
  std::vector<std::thread> threads;
  std::atomic<bool> done{false};
  std::thread observer([&] {
    while (!done) {
      const Metrics stats = StatsOf(table);
      ASSERT_EQ(NumAccountedFor(stats), stats["num_registered"]);
      ASSERT_LE(stats["num_in_flight"], 10u);
      ASSERT_LE(stats["num_buffered"], 40u);
      std::this_thread::yield();
    }
  });
  for (uint32_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] { Work(table, seed, num_holders); });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  observer.join();
  const Metrics stats = StatsOf(table);
  EXPECT_EQ(NumAccountedFor(stats), stats["num_registered"]);
  EXPECT_GT(stats["num_returned"], 0u);
  EXPECT_GT(stats["num_released"], 0u);
  EXPECT_GT(stats["num_expired"], 0u);
}

}  // namespace
}  // namespace persia::worker

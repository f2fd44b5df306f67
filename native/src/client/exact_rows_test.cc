// Exact training against synchronous training, over sockets: with batches in flight, rows and
// optimizer state must be equal to the last bit.
#include "client/exact_rows.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>

#include "client/exact_test_util.h"

namespace persia::client {
namespace {

using testing::BatchOf;
using testing::Cluster;
using testing::Config;
using testing::ExactRank;
using testing::Gradients;
using testing::Interrupted;
using testing::Must;
using testing::Soon;
using testing::Take;
using testing::TrainSynchronously;
using testing::WholeRowsOf;

void ExpectExact(OptimizerKind kind, uint32_t in_flight, const Placement& placement,
                 uint32_t num_workers, uint64_t max_bytes = ExactRows::kMaxBytes,
                 uint64_t spare_bytes = HeldRows::kSpareBytes) {
  constexpr uint32_t kNumSteps = 60;
  Cluster plain(placement.num_servers()), exact(placement, num_workers);
  ASSERT_TRUE(plain.client().Configure(Config(kind), false, Soon()).ok());
  ExactRank::Begin(exact.client(), max_bytes, spare_bytes);
  ASSERT_TRUE(exact.client().Configure(Config(kind), false, Soon()).ok());
  const auto expected = TrainSynchronously(plain, kNumSteps);
  ExactRank rank(exact, exact.client(), in_flight, num_workers);
  EXPECT_EQ(rank.Train(kNumSteps), expected);
  EXPECT_EQ(WholeRowsOf(exact, placement), WholeRowsOf(plain, placement.num_servers()));
  const Metrics metrics = exact.client().exact_rows()->metrics();
  EXPECT_EQ(metrics["num_held_rows"] > 0, max_bytes > 0);
  EXPECT_GT(metrics["num_replayed_rows"], 0u);
  EXPECT_EQ(metrics["num_row_compactions"] > 0, spare_bytes == 0);
  if (in_flight > 4 || max_bytes > 10'000) {
    EXPECT_GT(metrics["num_spared_rows"], metrics["num_fetched_rows"]);
  }
}

TEST(ExactRowsTest, EqualsSynchronousTrainingToTheLastBit) {
  for (const uint32_t in_flight : {1, 2, 4, 16}) {
    SCOPED_TRACE(in_flight);
    ExpectExact(OptimizerKind::kAdam, in_flight, /*num_servers=*/2, /*num_workers=*/1);
  }
}

TEST(ExactRowsTest, EqualsSynchronousTrainingWhateverRowsAreEvicted) {
  for (const uint64_t max_bytes : {0, 1'000, 10'000}) {
    for (const uint32_t in_flight : {1, 4, 16}) {
      SCOPED_TRACE(std::to_string(max_bytes) + " bytes, in flight: " + std::to_string(in_flight));
      ExpectExact(OptimizerKind::kAdam, in_flight, 2, 1, max_bytes);
    }
  }
}

// Slabs alone exceed the bound, so the rows of batches in flight move with almost every call.
TEST(ExactRowsTest, EqualsSynchronousTrainingWhateverRowsAreMoved) {
  for (const uint32_t in_flight : {1, 4, 16}) {
    SCOPED_TRACE(in_flight);
    ExpectExact(OptimizerKind::kAdam, in_flight, 2, 1, /*max_bytes=*/0, /*spare_bytes=*/0);
  }
}

TEST(ExactRowsTest, WithEachOptimizer) {
  for (uint8_t number = 0; number < kNumOptimizerKinds; ++number) {
    const auto kind = static_cast<OptimizerKind>(number);
    SCOPED_TRACE(static_cast<int>(kind));
    ExpectExact(kind, 8, 3, 1);
  }
}

TEST(ExactRowsTest, WithSeveralWorkers) { ExpectExact(OptimizerKind::kAdam, 8, 2, 3); }

TEST(ExactRowsTest, WithVirtualShardsThatWereMoved) {
  std::vector<MovedShard> moved;
  for (uint16_t shard = 0; shard < 1000; ++shard) moved.push_back({shard, 1});
  ExpectExact(OptimizerKind::kAdam, 8, Placement::Create(3, 2, moved).value(), 2);
}

TEST(ExactRowsTest, AServerThatIsStartedAgainIsAnError) {
  Cluster cluster(2);
  Interrupted rank(cluster);
  RemoteClient& client = cluster.client();
  for (const uint32_t server : {0, 1}) {
    cluster.StopServer(server);
    cluster.StartServer(server);
  }
  const auto later = BatchOf(3);
  const auto failed = client.LookupWhole(cluster.Register(later), later, Soon()).status();
  EXPECT_EQ(failed.code(), StatusCode::kFailedPrecondition) << failed.ToString();
  EXPECT_NE(failed.message().find("was started again"), std::string::npos) << failed.ToString();
  EXPECT_FALSE(client.PoolExact(rank.first).ok());
  EXPECT_NE(failed.message().find("begin a new context"), std::string::npos) << failed.ToString();
  // With the last batch in flight the old rows go: the next one has those of the servers.
  EXPECT_TRUE(client.Release(rank.first, Soon()).ok());
  const auto next = Must(client.LookupWhole(cluster.Register(later), later, Soon()));
  const auto fresh = Must(client.PoolExact(next.reference));
  EXPECT_EQ(Take(fresh), Take(Must(cluster.NewClient()->LookupDirect(0, later, true, Soon()))));
}

TEST(ExactRowsTest, AnUpdateOfRowsThatTheServersHaveLostIsAnError) {
  Cluster cluster(1);
  Interrupted rank(cluster);
  cluster.StopServer(0);
  cluster.StartServer(0);
  const auto lost =
      cluster.client().ReturnGradients(rank.first, 1.0f, rank.gradients->slots, Soon()).status();
  EXPECT_EQ(lost.code(), StatusCode::kFailedPrecondition) << lost.ToString();
  EXPECT_NE(lost.message().find("had no row for"), std::string::npos) << lost.ToString();
}

// The worker dies with an update outstanding. Another takes the batch over; the rows are as if
// nothing had happened.
TEST(ExactRowsTest, ABatchContinuesOnAnotherWorker) {
  Cluster plain(2), exact(2, 2);
  ASSERT_TRUE(plain.client().Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
  for (const uint32_t step : {0, 1}) {
    const auto result = Must(plain.client().Lookup(plain.Register(BatchOf(step)), true, Soon()));
    const Gradients gradients(result);
    Must(plain.client().ReturnGradients(result.reference, 1.0f, gradients.slots, Soon()));
  }
  Interrupted rank(exact);
  RemoteClient& client = exact.client();
  const auto second = exact.Register(BatchOf(1), 1);
  ASSERT_TRUE(client.LookupWhole(second, BatchOf(1), Soon()).ok());
  exact.StartWorker(0);  // without the batch
  const auto missed = client.ReturnGradients(rank.first, 1.0f, rank.gradients->slots, Soon());
  ASSERT_EQ(missed.status().code(), StatusCode::kNotFound);
  const auto moved =
      Must(client.LookupDirect(1, BatchOf(0), true, Soon(), kAllSlots, rank.first)).reference;
  const auto pooled = Must(client.PoolExact(second));
  const Gradients gradients(pooled);
  ASSERT_TRUE(client.ApplyExact(second, 1.0f, gradients.slots).ok());
  auto last = std::async(std::launch::async, [&] {
    return client.ReturnGradients(second, 1.0f, gradients.slots, Soon()).ok();
  });
  Must(client.ReturnGradients(moved, 1.0f, rank.gradients->slots, Soon()));
  EXPECT_TRUE(last.get());
  EXPECT_EQ(WholeRowsOf(exact, 2), WholeRowsOf(plain, 2));
}

TEST(ExactRowsTest, SettingsThatChangeRowsOtherwiseAreRefused) {
  const auto refuse = [](auto change, const std::string& what) {
    Cluster cluster(1);
    ExactRank::Begin(cluster.client());
    TrainConfig config = Config(OptimizerKind::kSgd);
    change(&config);
    const Status status = cluster.client().Configure(config, false, Soon());
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << what;
    EXPECT_NE(status.message().find(what), std::string::npos) << status.ToString();
  };
  refuse([](TrainConfig* config) { config->admit_probability = 0.5f; }, "admit_probability");
  refuse([](TrainConfig* config) { config->admit_after = 2; }, "admit_after");
  refuse([](TrainConfig* config) { config->time_to_live_sec = 9; }, "time_to_live_sec");
  refuse([](TrainConfig* config) { config->min_norm = 0.1f; }, "min_norm");
  Cluster tiered(1, 1, /*cache_rows=*/8);
  ExactRank::Begin(tiered.client());
  ASSERT_TRUE(tiered.client().Configure(Config(OptimizerKind::kSgd), false, Soon()).ok());
  const auto tier =
      tiered.client().LookupWhole(tiered.Register(BatchOf(0)), BatchOf(0), Soon()).status();
  EXPECT_NE(tier.message().find("storage tier"), std::string::npos) << tier.ToString();
  Cluster narrow(1);
  const auto slots = testing::Slots();
  auto rows = Must(ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0));
  EXPECT_EQ(narrow.NewClient(worker::WireDtype::kFloat16)->BeginExact(std::move(rows)).code(),
            StatusCode::kInvalidArgument);
}

TEST(ExactRowsTest, RowsAreNotSetOrClearedUnderBatchesInFlight) {
  Cluster cluster(1);
  const Interrupted rank(cluster);
  EXPECT_EQ(cluster.client().Clear(Soon()).code(), StatusCode::kFailedPrecondition);
  const uint64_t sign = 1;
  const std::vector<float> row(4, 0.0f);
  EXPECT_EQ(cluster.client().SetEmbeddings(4, {&sign, 1}, row, Soon()).code(),
            StatusCode::kFailedPrecondition);
}

// With the held rows alone: the lookup has its rows on the way, or they arrive under others.
TEST(ExactRowsTest, OtherRowsAndLookupsExcludeEachOther) {
  const auto slots = testing::Slots();
  const auto rows = Must(ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0));
  ASSERT_TRUE(rows->Configure(Config(OptimizerKind::kAdam)).ok());
  worker::LookupWholeRequest request;
  const auto under_way = Must(rows->Begin(BatchOf(0), &request, Soon()));
  const Status refused = rows->BeginOtherRows("rows were cleared");
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.ToString();
  EXPECT_NE(refused.message().find("rows were cleared while"), std::string::npos);
  EXPECT_FALSE(rows->CheckIdle("a context was begun").ok());
  rows->Abandon(under_way);
  ASSERT_TRUE(rows->BeginOtherRows("rows were loaded").ok());
  ASSERT_TRUE(rows->BeginOtherRows("rows were set").ok());  // by the load
  rows->EndOtherRows();
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(rows->Begin(BatchOf(0), &request, now).status().code(), StatusCode::kDeadlineExceeded);
  auto waiting =
      std::async(std::launch::async, [&] { return rows->Begin(BatchOf(0), &request, Soon()); });
  rows->EndOtherRows();
  rows->Abandon(Must(waiting.get()));
}

TEST(ExactRowsTest, ALookupWaitsForTheEndOfOtherRows) {
  Cluster cluster(1);
  RemoteClient& client = cluster.client();
  ExactRank::Begin(client);
  ASSERT_TRUE(client.Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
  ASSERT_TRUE(client.BeginOtherRows("a checkpoint was loaded").ok());
  const BatchReference batch = cluster.Register(BatchOf(0));
  auto lookup =
      std::async(std::launch::async, [&] { return client.LookupWhole(batch, BatchOf(0), Soon()); });
  // What a lookup that did not wait would make a failure of.
  EXPECT_TRUE(client.Clear(Soon()).ok());
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(client.LookupWhole(cluster.Register(BatchOf(1)), BatchOf(1), now).status().code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Must(client.Sizes(Soon())), std::vector<uint64_t>{0});
  client.EndOtherRows();
  EXPECT_TRUE(lookup.get().ok());
  EXPECT_FALSE(client.BeginOtherRows("a checkpoint was loaded").ok());
}

// Rows that the context would fetch may be those of before a load that has begun without it.
TEST(ExactRowsTest, NoContextBeginsWhileOtherRowsChange) {
  Cluster cluster(1);
  RemoteClient& client = cluster.client();
  const auto slots = testing::Slots();
  const auto make = [&] {
    return Must(ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0));
  };
  ASSERT_TRUE(client.BeginOtherRows("a checkpoint was loaded").ok());
  EXPECT_EQ(client.BeginExact(make()).code(), StatusCode::kFailedPrecondition);
  client.EndOtherRows();
  EXPECT_TRUE(client.BeginExact(make()).ok());
}

uint64_t NumHeld(const RemoteClient& client) {
  return client.exact_rows()->metrics()["num_held_rows"];
}

// The worker had only seemed dead: its copy is released, while the batch is at another one.
TEST(ExactRowsTest, TheReleaseOfACopyLeavesTheBatch) {
  Cluster cluster(2, 2);
  Interrupted rank(cluster);
  RemoteClient& client = cluster.client();
  const auto moved =
      Must(client.LookupDirect(1, BatchOf(0), true, Soon(), kAllSlots, rank.first)).reference;
  const uint64_t num_held = NumHeld(client);
  EXPECT_GT(num_held, 0u);
  EXPECT_TRUE(client.Release(rank.first, Soon()).ok());
  EXPECT_EQ(NumHeld(client), num_held);
  EXPECT_TRUE(client.PoolExact(moved).ok());
  Must(client.ReturnGradients(moved, 1.0f, rank.gradients->slots, Soon()));
  EXPECT_EQ(NumHeld(client), 0u);
}

// The first worker dies before the lookup, the second one after it.
TEST(ExactRowsTest, ABatchMovesTwice) {
  Cluster plain(2), exact(2, 3);
  ASSERT_TRUE(plain.client().Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
  const auto result = Must(plain.client().Lookup(plain.Register(BatchOf(0)), true, Soon()));
  const Gradients expected(result);
  Must(plain.client().ReturnGradients(result.reference, 1.0f, expected.slots, Soon()));

  RemoteClient& client = exact.client();
  ExactRank::Begin(client, 0);
  ASSERT_TRUE(client.Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
  const BatchReference first = exact.Register(BatchOf(0), 0);
  const auto move_to = [&](uint32_t worker) {
    return Must(client.LookupDirect(worker, BatchOf(0), true, Soon(), kAllSlots, first)).reference;
  };
  exact.StartWorker(0);
  EXPECT_EQ(client.LookupWhole(first, BatchOf(0), Soon()).status().code(), StatusCode::kNotFound);
  const BatchReference second = move_to(1);
  ASSERT_TRUE(client.LookupWhole(second, BatchOf(0), Soon()).ok());
  const auto pooled = Must(client.PoolExact(second));
  const Gradients gradients(pooled);
  ASSERT_TRUE(client.ApplyExact(second, 1.0f, gradients.slots).ok());
  exact.StartWorker(1);
  const BatchReference third = move_to(2);
  Must(client.ReturnGradients(third, 1.0f, gradients.slots, Soon()));
  EXPECT_EQ(NumHeld(client), 0u);
  EXPECT_EQ(WholeRowsOf(exact, 2), WholeRowsOf(plain, 2));
}

TEST(ExactRowsTest, GivingUpABatchWhoseUpdateIsAppliedIsAnError) {
  Cluster cluster(2);
  Interrupted rank(cluster);
  RemoteClient& client = cluster.client();
  const BatchReference second = cluster.Register(BatchOf(1));
  ASSERT_TRUE(client.LookupWhole(second, BatchOf(1), Soon()).ok());
  const Status lost = client.Release(rank.first, Soon());
  EXPECT_EQ(lost.code(), StatusCode::kFailedPrecondition) << lost.ToString();
  EXPECT_NE(lost.message().find("which the servers do not get"), std::string::npos);
  EXPECT_EQ(client.PoolExact(second).status().message(), lost.message());
  EXPECT_TRUE(client.Release(second, Soon()).ok());  // it has no update
  const auto next = Must(client.LookupWhole(cluster.Register(BatchOf(2)), BatchOf(2), Soon()));
  EXPECT_TRUE(client.PoolExact(next.reference).ok());
}

TEST(ExactRowsTest, OtherTrainingIsRefusedUntilTheContextEnds) {
  Cluster cluster(1);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
  const auto before = Must(client.LookupDirect(0, BatchOf(0), true, Soon()));
  const Gradients gradients(before);
  ExactRank::Begin(client);
  const auto give_back = [&] {
    return client.ReturnGradients(before.reference, 1.0f, gradients.slots, Soon()).status();
  };
  const BatchReference batch = cluster.Register(BatchOf(1));
  const auto code = StatusCode::kFailedPrecondition;
  EXPECT_EQ(client.Lookup(batch, true, Soon()).status().code(), code);
  EXPECT_EQ(client.LookupDirect(0, BatchOf(1), true, Soon()).status().code(), code);
  EXPECT_EQ(give_back().code(), code);
  EXPECT_TRUE(client.LookupDirect(0, BatchOf(1), false, Soon()).ok());
  client.EndExact();
  EXPECT_TRUE(give_back().ok());
  EXPECT_TRUE(client.Lookup(batch, true, Soon()).ok());
  EXPECT_FALSE(client.PoolExact(batch).ok());
}

// As for a worker that joins a loop, which always has updates on their way.
TEST(ExactRowsTest, TheSameConfigDoesNotWaitForUpdates) {
  Cluster cluster(1);
  const Interrupted rank(cluster);
  RemoteClient& client = cluster.client();
  EXPECT_TRUE(client.Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
  const auto now = std::chrono::steady_clock::now();
  const Status other = client.Configure(Config(OptimizerKind::kSgd), true, now);
  EXPECT_EQ(other.code(), StatusCode::kDeadlineExceeded) << other.ToString();
  EXPECT_NE(other.message().find("1 updates were not acknowledged"), std::string::npos);
}

// The repetitions of returns that wait for the first one leave it a handler.
TEST(ExactRowsTest, ARepeatedReturnDoesNotWaitForItsTurn) {
  Cluster cluster(1);
  Interrupted rank(cluster);
  const auto second = Must(cluster.client().LookupWhole({}, BatchOf(1), Soon())).reference;
  const auto pooled = Must(cluster.client().PoolExact(second));
  const Gradients gradients(pooled);
  std::vector<std::future<StatusOr<ReturnReport>>> tries;
  for (int i = 0; i < 2; ++i) {
    tries.push_back(std::async(std::launch::async, [&] {
      return cluster.worker(0).ReturnGradients(second, 1.0f, gradients.slots, Soon(), rank.first);
    }));
  }
  const auto is_over = [](auto& call) {
    return call.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
  };
  size_t repeated = 0;
  while (!is_over(tries[repeated])) repeated = 1 - repeated;
  EXPECT_EQ(tries[repeated].get().status().code(), StatusCode::kUnavailable);
  Must(cluster.client().ReturnGradients(rank.first, 1.0f, rank.gradients->slots, Soon()));
  Must(tries[1 - repeated].get());
}

}  // namespace
}  // namespace persia::client

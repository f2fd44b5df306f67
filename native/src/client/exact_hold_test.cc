// Rows that stay at a rank with consistency="exact" while no batch is in flight: what changes them
// elsewhere ends the hold.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <numeric>
#include <vector>

#include "client/exact_test_util.h"

namespace persia::client {
namespace {

using testing::BatchOf;
using testing::Cluster;
using testing::Config;
using testing::ExactRank;
using testing::Interrupted;
using testing::Must;
using testing::Soon;
using testing::Take;

// A loop that has ended: the rank holds rows and has no batch in flight.
struct Idle {
  explicit Idle(Cluster& cluster) {
    RemoteClient& client = cluster.client();
    ExactRank::Begin(client);
    EXPECT_TRUE(client.Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
    ExactRank(cluster, client, 4, 1).Train(20);
    EXPECT_GT(client.exact_rows()->metrics()["num_held_rows"], 0u);
  }
};

// ExactRows that a test drives call by call.
struct ByHand {
  struct Lookup {
    worker::LookupWholeRequest request;  // views the batch
    ExactRows::BatchPtr batch;
  };

  explicit ByHand(Cluster& of) : cluster(of) {
    EXPECT_TRUE(cluster.client().Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
    const auto slots = testing::Slots();
    rows = Must(ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0));
    EXPECT_TRUE(rows->Configure(Config(OptimizerKind::kAdam)).ok());
  }
  Lookup Begin() {
    Lookup lookup;
    lookup.request.key = cluster.Register(BatchOf(0));
    lookup.batch = Must(rows->Begin(BatchOf(0), &lookup.request, Soon()));
    return lookup;
  }
  worker::WholeRows Answer(const Lookup& lookup) {
    return Must(cluster.worker(0).LookupWhole(lookup.request, Soon()));
  }
  uint64_t num_held() const { return rows->metrics()["num_held_rows"]; }

  Cluster& cluster;
  std::unique_ptr<ExactRows> rows;
};

// That the next loop begins with the rows of the servers, with several lookups at once.
void ExpectRowsOfServers(Cluster& cluster) {
  RemoteClient& client = cluster.client();
  std::vector<std::future<StatusOr<LookupResult>>> lookups;
  for (uint32_t step = 0; step < 4; ++step) {
    lookups.push_back(std::async(std::launch::async, [&, step] {
      return client.LookupWhole(cluster.Register(BatchOf(step)), BatchOf(step), Soon());
    }));
  }
  const auto other = cluster.NewClient();
  for (uint32_t step = 0; step < 4; ++step) {
    const auto reference = Must(lookups[step].get()).reference;
    const auto expected = Must(other->LookupDirect(0, BatchOf(step), true, Soon()));
    EXPECT_EQ(Take(Must(client.PoolExact(reference))), Take(expected)) << step;
    EXPECT_TRUE(client.Release(reference, Soon()).ok());
  }
}

TEST(RowsOfRankTest, RowsOfAnIdleRankAreThoseOfTheServers) {
  Cluster cluster(2);
  const Idle rank(cluster);
  const uint64_t num_fetched = cluster.client().exact_rows()->metrics()["num_fetched_rows"];
  ExpectRowsOfServers(cluster);
  EXPECT_EQ(cluster.client().exact_rows()->metrics()["num_fetched_rows"], num_fetched);
}

TEST(RowsOfRankTest, AServerThatIsStartedAgainBetweenLoopsEndsTheHold) {
  Cluster cluster(2);
  const Idle rank(cluster);
  cluster.StopServer(1);
  cluster.StartServer(1);
  ExpectRowsOfServers(cluster);
}

TEST(RowsOfRankTest, RowsThatAreClearedOrLoadedEndTheHold) {
  Cluster cluster(2);
  const Idle rank(cluster);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.BeginOtherRows("a checkpoint was loaded").ok());
  EXPECT_EQ(client.exact_rows()->metrics()["num_held_rows"], 0u);
  client.EndOtherRows();
  ExpectRowsOfServers(cluster);
  ASSERT_TRUE(client.Clear(Soon()).ok());
  EXPECT_EQ(client.exact_rows()->metrics()["num_held_rows"], 0u);
  ExpectRowsOfServers(cluster);
}

// The rank does not know of it, as it has not made the call.
TEST(RowsOfRankTest, RowsThatAnotherClientChangesEndTheHold) {
  Cluster cluster(2);
  const Idle rank(cluster);
  const auto other = cluster.NewClient();
  ASSERT_TRUE(other->Clear(Soon()).ok());
  ExpectRowsOfServers(cluster);
  const auto slots = testing::Slots();
  const auto table = Must(worker::SlotTable::Create(slots.feature_index_prefix_bit, slots.slots));
  const worker::SlotConfig& slot = table.slots()[0];
  std::vector<uint64_t> ids(100);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<uint64_t> signs(ids.size() * slot.num_buckets());
  table.MakeSigns(slot, ids, signs.data());
  const std::vector<float> ones(signs.size() * slot.dim, 1.0f);
  ASSERT_TRUE(other->SetEmbeddings(slot.dim, signs, ones, Soon()).ok());
  ExpectRowsOfServers(cluster);
}

TEST(RowsOfRankTest, RowsThatAnotherClientChangesUnderBatchesInFlightAreAnError) {
  Cluster cluster(2);
  const Interrupted rank(cluster);
  ASSERT_TRUE(cluster.NewClient()->Clear(Soon()).ok());
  const auto failed =
      cluster.client().LookupWhole(cluster.Register(BatchOf(0)), BatchOf(0), Soon()).status();
  EXPECT_EQ(failed.code(), StatusCode::kFailedPrecondition) << failed.ToString();
  EXPECT_NE(failed.message().find("set, cleared or loaded"), std::string::npos);
}

// Two lookups ask for the same rows; the second answer lacks its last float.
TEST(RowsOfRankTest, ARefusedAnswerKeepsTheRowsOfABatchInFlight) {
  Cluster cluster(1);
  ByHand rank(cluster);
  const auto first = rank.Begin(), second = rank.Begin();
  const auto reference = Must(rank.rows->Arrive(first.batch, 0, rank.Answer(first))).reference;
  const uint64_t num_held = rank.num_held();
  const auto before = Take(Must(rank.rows->Pool(reference)));
  worker::WholeRows cut = rank.Answer(second);
  cut.rows[0] = cut.rows[0].first(cut.rows[0].size() - 1);
  EXPECT_EQ(rank.rows->Arrive(second.batch, 0, cut).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(rank.num_held(), num_held);
  EXPECT_EQ(Take(Must(rank.rows->Pool(reference))), before);
}

// Whether rows were changed while servers were added cannot be told from the incarnations.
TEST(RowsOfRankTest, AnotherNumberOfServersEndsTheHoldOfAnIdleRank) {
  Cluster cluster(1);
  ByHand rank(cluster);
  const auto first = rank.Begin();
  worker::WholeRows answer = rank.Answer(first);
  const auto reference = Must(rank.rows->Arrive(first.batch, 0, answer)).reference;
  ASSERT_TRUE(rank.rows->End(reference).ok());
  auto second = rank.Begin();
  worker::WholeRows resized = rank.Answer(second);
  resized.incarnations.push_back(5);
  EXPECT_TRUE(rank.rows->AsksAgain(*second.batch, resized, &second.request));
  EXPECT_EQ(rank.num_held(), 0u);
  rank.rows->Abandon(second.batch);
}

TEST(RowsOfRankTest, TheEndOfTheContextFreesTheRows) {
  Cluster cluster(1);
  const Idle rank(cluster);
  cluster.client().EndExact();
  EXPECT_EQ(cluster.client().exact_rows()->metrics()["num_held_rows"], 0u);
}

}  // namespace
}  // namespace persia::client

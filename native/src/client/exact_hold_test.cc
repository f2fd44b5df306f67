// Rows that stay at a rank with consistency="exact" while no batch is in flight: what changes them
// elsewhere ends the hold.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "client/exact_test_util.h"
#include "store/store_load.h"

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

  explicit ByHand(Cluster& of, uint64_t max_bytes = ExactRows::kMaxBytes,
                  uint64_t spare_bytes = HeldRows::kSpareBytes)
      : cluster(of) {
    EXPECT_TRUE(cluster.client().Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
    const auto slots = testing::Slots();
    rows = Must(
        ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0, max_bytes, spare_bytes));
    EXPECT_TRUE(rows->Configure(Config(OptimizerKind::kAdam)).ok());
  }
  Lookup Begin(const std::vector<std::byte>& bytes = BatchOf(0)) {
    Lookup lookup;
    lookup.request.key = cluster.Register(bytes);
    lookup.batch = Must(rows->Begin(bytes, &lookup.request, Soon()));
    return lookup;
  }
  worker::WholeRows Answer(const Lookup& lookup) {
    return Must(cluster.worker(0).LookupWhole(lookup.request, Soon()));
  }
  BatchReference LookUp(const std::vector<std::byte>& bytes) {
    const Lookup lookup = Begin(bytes);
    return Must(rows->Arrive(lookup.batch, 0, Answer(lookup))).reference;
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

// Rows of the first slot, all ones.
struct Ones {
  Ones() {
    const auto slots = testing::Slots();
    const auto table = Must(worker::SlotTable::Create(slots.feature_index_prefix_bit, slots.slots));
    const worker::SlotConfig& slot = table.slots()[0];
    std::vector<uint64_t> ids(100);
    std::iota(ids.begin(), ids.end(), 0);
    dim = slot.dim;
    signs.resize(ids.size() * slot.num_buckets());
    table.MakeSigns(slot, ids, signs.data());
    values.assign(signs.size() * dim, 1.0f);
  }
  uint32_t dim;
  std::vector<uint64_t> signs;
  std::vector<float> values;
};

// What another process may do to the rows.
using Change = void (*)(Cluster&);
void Clear(Cluster& cluster) { ASSERT_TRUE(cluster.NewClient()->Clear(Soon()).ok()); }
void SetRows(Cluster& cluster) {
  const Ones ones;
  const auto other = cluster.NewClient();
  ASSERT_TRUE(other->SetEmbeddings(ones.dim, ones.signs, ones.values, Soon()).ok());
}
// As a server that loads a checkpoint: every row with new values and a fresh state.
void Load(Cluster& cluster) {
  const Ones ones;
  const std::vector<uint32_t> ages(ones.signs.size(), 1);
  for (const uint32_t server : {0, 1}) {
    const auto load = Must(store::StoreLoad::Begin(cluster.server(server).embedding_store()));
    ASSERT_TRUE(load->Replace(Config(OptimizerKind::kAdam)).ok());
    ASSERT_TRUE(load->Add({.dim = ones.dim,
                           .signs = ones.signs,
                           .ages = ages,
                           .embeddings = ones.values.data()})
                    .ok());
  }
}

class RowsOfOthersTest : public ::testing::TestWithParam<Change> {};

// The rank does not know of it, as it has not made the call.
TEST_P(RowsOfOthersTest, EndTheHoldOfAnIdleRank) {
  Cluster cluster(2);
  const Idle rank(cluster);
  GetParam()(cluster);
  ExpectRowsOfServers(cluster);
}

TEST_P(RowsOfOthersTest, AreAnErrorUnderBatchesInFlight) {
  Cluster cluster(2);
  const Interrupted rank(cluster);
  GetParam()(cluster);
  const auto failed =
      cluster.client().LookupWhole(cluster.Register(BatchOf(0)), BatchOf(0), Soon()).status();
  EXPECT_EQ(failed.code(), StatusCode::kFailedPrecondition) << failed.ToString();
  EXPECT_NE(failed.message().find("set, cleared or loaded"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Changes, RowsOfOthersTest, ::testing::Values(&Clear, &SetRows, &Load));

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

// All have restarted, and have forgotten the placement of their generation.
TEST(RowsOfRankTest, ServersThatRestartWithoutTheirPlacementAreAnErrorUnderBatchesInFlight) {
  Cluster cluster(2);
  ByHand rank(cluster);
  const auto first = rank.Begin(), second = rank.Begin();
  ASSERT_TRUE(rank.rows->Arrive(first.batch, 0, rank.Answer(first)).ok());
  worker::WholeRows restarted = rank.Answer(second);
  const std::vector<MovedShard> moved = {{.shard = 0, .server = 1}};
  restarted.placement = Must(Placement::Create(2, restarted.placement.generation(), moved));
  for (uint64_t& incarnation : restarted.incarnations) ++incarnation;
  const Status failed = rank.rows->Arrive(second.batch, 0, restarted).status();
  EXPECT_EQ(failed.code(), StatusCode::kFailedPrecondition) << failed.ToString();
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

// The script may keep a batch longer than the context; its release reaches the worker alone.
TEST(RowsOfRankTest, TheEndOfTheContextFreesTheRowsOfABatchInFlight) {
  Cluster cluster(1);
  const Interrupted rank(cluster);
  RemoteClient& client = cluster.client();
  client.EndExact();
  EXPECT_EQ(client.exact_rows()->metrics()["num_held_rows"], 0u);
  EXPECT_TRUE(client.Release(rank.first, Soon()).ok());
}

// A thread that still looks up when the context ends.
TEST(RowsOfRankTest, TheLastLookupOfAContextFreesItsRows) {
  Cluster cluster(1);
  ByHand rank(cluster);
  const auto first = rank.Begin(), second = rank.Begin();
  const auto reference = Must(rank.rows->Arrive(first.batch, 0, rank.Answer(first))).reference;
  rank.rows->EndContext();
  EXPECT_GT(rank.num_held(), 0u);
  EXPECT_TRUE(rank.rows->Arrive(second.batch, 0, rank.Answer(second)).ok());
  EXPECT_EQ(rank.num_held(), 0u);
  const auto code = StatusCode::kFailedPrecondition;
  EXPECT_EQ(rank.rows->Pool(reference).status().code(), code);
  EXPECT_EQ(rank.rows->Apply(reference, 1.0f, {}).code(), code);
  worker::LookupWholeRequest request;
  EXPECT_EQ(rank.rows->Begin(BatchOf(0), &request, Soon()).status().code(), code);
}

TEST(RowsOfRankTest, ABoundOfZeroKeepsNoRowsWhenNoBatchIsInFlight) {
  Cluster cluster(1);
  ByHand rank(cluster, /*max_bytes=*/0);
  const auto lookup = rank.Begin();
  const auto reference = Must(rank.rows->Arrive(lookup.batch, 0, rank.Answer(lookup))).reference;
  EXPECT_GT(rank.num_held(), 0u);
  ASSERT_TRUE(rank.rows->End(reference).ok());
  EXPECT_EQ(rank.num_held(), 0u);
}

// To pool it, or to reduce its gradients, takes so long that calls of other threads come between.
// Its rows fill blocks of their own, which go back to the system when they are freed.
std::vector<std::byte> LargeBatch(uint64_t first_id = 0) {
  constexpr uint32_t kNumRows = 45'000;  // the servers have room for two such batches
  constexpr uint32_t kNumSamples = 4'500, kNumIds = 200;  // of each sample
  std::vector<uint32_t> offsets = {0};
  std::vector<uint64_t> ids;
  for (uint32_t sample = 0; sample < kNumSamples; ++sample) {
    for (uint32_t i = 0; i < kNumIds; ++i) ids.push_back(first_id + ids.size() % kNumRows);
    offsets.push_back(static_cast<uint32_t>(ids.size()));
  }
  return Must(EncodeIdFeatures({kNumSamples, {{"age", offsets, ids}}}));
}

constexpr int kNumRounds = 8;  // of a race

// Another thread pools the batch again and again, until this one has called or the batch is gone.
// Each result must equal the first one.
void CallWhilePooling(ByHand& rank, const BatchReference& batch,
                      const std::function<void()>& call) {
  const auto expected = Take(Must(rank.rows->Pool(batch)));
  std::atomic<bool> has_begun = false, is_over = false;
  auto pools = std::async(std::launch::async, [&] {
    has_begun = true;
    has_begun.notify_one();
    for (bool is_last = false; !is_last;) {
      is_last = is_over;
      auto result = rank.rows->Pool(batch);
      if (!result.ok()) return;
      EXPECT_TRUE(Take(*result) == expected);  // too long to print
    }
  });
  has_begun.wait(false);
  call();
  is_over = true;
  pools.get();
}

// The rows of the batch that ends leave more memory than the rank may keep.
TEST(RowsOfRankTest, RowsDoNotMoveWhileABatchIsPooled) {
  Cluster cluster(1);
  ByHand rank(cluster, /*max_bytes=*/0, /*spare_bytes=*/0);
  for (int i = 0; i < kNumRounds; ++i) {
    const BatchReference before = rank.LookUp(LargeBatch(1'000'000));
    const BatchReference pooled = rank.LookUp(LargeBatch());
    const uint64_t num_compactions = rank.rows->metrics()["num_row_compactions"];
    CallWhilePooling(rank, pooled, [&] {
      EXPECT_TRUE(rank.rows->End(before).ok());
      EXPECT_TRUE(rank.rows->End(rank.LookUp(BatchOf(0))).ok());
    });
    EXPECT_GT(rank.rows->metrics()["num_row_compactions"], num_compactions);
    EXPECT_TRUE(rank.rows->End(pooled).ok());
  }
}

TEST(RowsOfRankTest, RowsAreNotForgottenWhileABatchIsPooled) {
  Cluster cluster(1);
  ByHand rank(cluster);
  for (int i = 0; i < kNumRounds; ++i) {
    const BatchReference lost = rank.LookUp(LargeBatch());
    CallWhilePooling(rank, lost, [&] { rank.rows->Fail(lost, Unavailable("no server")); });
    EXPECT_EQ(rank.num_held(), 0u);
    const BatchReference ended = rank.LookUp(LargeBatch());
    CallWhilePooling(rank, ended, [&] {
      EXPECT_TRUE(rank.rows->End(ended).ok());
      while (!rank.rows->BeginOtherRows("a checkpoint was loaded").ok()) std::this_thread::yield();
      rank.rows->EndOtherRows();
    });
    EXPECT_EQ(rank.num_held(), 0u);
  }
}

// If both succeeded, the update would be lost, and nothing would say so.
TEST(RowsOfRankTest, ABatchThatIsEndedWhileItIsAppliedHasNoUpdate) {
  Cluster cluster(1);
  ByHand rank(cluster, /*max_bytes=*/0, /*spare_bytes=*/0);
  for (int i = 0; i < kNumRounds; ++i) {
    const BatchReference batch = rank.LookUp(LargeBatch());
    const auto pooled = Must(rank.rows->Pool(batch));
    const Gradients gradients(pooled);
    std::atomic<bool> has_begun = false;
    auto ended = std::async(std::launch::async, [&] {
      has_begun.wait(false);
      return rank.rows->End(batch);
    });
    has_begun = true;
    has_begun.notify_one();
    const Status applied = rank.rows->Apply(batch, 1.0f, gradients.slots);
    const Status end = ended.get();
    ASSERT_EQ(applied.code(), end.ok() ? StatusCode::kNotFound : StatusCode::kOk);
    ASSERT_EQ(end.code(), end.ok() ? StatusCode::kOk : StatusCode::kFailedPrecondition);
    ASSERT_TRUE(rank.rows->WaitApplied(Soon()).ok());
  }
}

}  // namespace
}  // namespace persia::client

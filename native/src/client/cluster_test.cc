// Remote and embedded clients on the same batches, against real servers and workers over sockets.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <numeric>
#include <thread>

#include "client/test_support.h"

namespace persia::client {
namespace {

using testing::Adam;
using testing::Batch;
using testing::Cluster;
using testing::Gradients;
using testing::Must;
using testing::Pools;
using testing::Snapshot;
using testing::Soon;
using testing::Take;

std::vector<Snapshot> TrainEmbedded(uint32_t num_steps) {
  const auto client = Must(EmbeddedClient::Create(testing::Slots(), testing::StoreOptions()));
  EXPECT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  return testing::Train(
      *client, [&](std::span<const std::byte> batch) { return Must(client->Register(0, batch)); },
      num_steps);
}

std::vector<Snapshot> TrainCluster(uint32_t num_servers, uint32_t num_steps) {
  Cluster cluster(num_servers);
  EXPECT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  return testing::Train(
      cluster.client(), [&](std::span<const std::byte> batch) { return cluster.Register(batch); },
      num_steps);
}

// The sizes of each server, added up.
uint64_t TotalRows(EmbeddingClient& client) {
  const auto sizes = Must(client.Sizes(Soon()));
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
}

TEST(ClusterTest, TrainsBitForBitLikeTheEmbeddedClient) {
  constexpr uint32_t kNumSteps = 8;
  const auto embedded = TrainEmbedded(kNumSteps);
  EXPECT_NE(embedded.front(), embedded.back());
  EXPECT_EQ(TrainCluster(1, kNumSteps), embedded);
  EXPECT_EQ(TrainCluster(3, kNumSteps), embedded);
}

// Batches wait for their lookup, and their rows are brought into memory meanwhile.
std::vector<Snapshot> TrainWithBatchesWaiting(EmbeddingClient& client, const testing::Register& add,
                                              uint32_t num_steps) {
  constexpr uint32_t kWaiting = 6;
  std::vector<BatchReference> waiting;
  for (uint32_t i = 0; i < num_steps; ++i) waiting.push_back(add(Batch(i % kWaiting)));
  uint32_t next = 0;
  return testing::Train(
      client, [&](std::span<const std::byte>) { return waiting[next++]; }, num_steps);
}

// What it had room for, or not; the rows themselves may have been looked up before.
uint64_t NumTold(const store::EmbeddingStore& store) {
  const auto stats = *store.tier().stats();
  return stats.num_prefetched + stats.num_unheeded;
}

TEST(ClusterTest, RowsInFilesAreAskedForAheadAndChangeNothing) {
  constexpr uint32_t kNumSteps = 30;
  const auto in_memory = [&] {
    Cluster cluster(2);
    EXPECT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
    auto history = TrainWithBatchesWaiting(
        cluster.client(), [&](auto batch) { return cluster.Register(batch); }, kNumSteps);
    EXPECT_EQ(cluster.worker(0).metrics()["num_hinted"], 0u);
    return history;
  }();
  constexpr uint64_t kCacheRows = 8;
  Cluster cluster(2, 1, kCacheRows);
  ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  EXPECT_EQ(TrainWithBatchesWaiting(
                cluster.client(), [&](auto batch) { return cluster.Register(batch); }, kNumSteps),
            in_memory);
  EXPECT_GT(cluster.worker(0).metrics()["num_hinted"], 0u);
  const auto deadline = Soon();
  while (NumTold(cluster.server(0).embedding_store()) == 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }

  const Pools pools;
  const auto embedded = Must(
      EmbeddedClient::Create(testing::Slots(), testing::StoreOptions(), pools.Tier(0, kCacheRows)));
  ASSERT_TRUE(embedded->Configure(Adam(), false, Soon()).ok());
  EXPECT_EQ(
      TrainWithBatchesWaiting(
          *embedded, [&](auto batch) { return Must(embedded->Register(0, batch)); }, kNumSteps),
      in_memory);
  EXPECT_GT(NumTold(embedded->embedding_store()), 0u);
}

TEST(ClusterTest, AnUnconfiguredClusterRefusesTraining) {
  Cluster cluster(2);
  EXPECT_EQ(cluster.client().LookupDirect(0, Batch(0), true, Soon()).status().code(),
            StatusCode::kFailedPrecondition);
}

TEST(ClusterTest, InferenceReadsZerosAndChangesNothing) {
  Cluster cluster(2);
  const auto result = Must(cluster.client().LookupDirect(0, Batch(0), false, Soon()));
  EXPECT_EQ(result.reference.reference, 0u);
  for (const auto& [slot, rows] : Take(result).rows) {
    EXPECT_EQ(rows, std::vector<float>(rows.size(), 0.0f)) << slot;
  }
  EXPECT_EQ(TotalRows(cluster.client()), 0u);
}

TEST(ClusterTest, RowsAreSetSpreadCountedAndCleared) {
  Cluster cluster(3);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  std::vector<uint64_t> signs(100);
  std::iota(signs.begin(), signs.end(), 0);
  const std::vector<float> rows(signs.size() * 4, 0.5f);
  ASSERT_TRUE(client.SetEmbeddings(4, signs, rows, Soon()).ok());
  const auto sizes = Must(client.Sizes(Soon()));
  ASSERT_EQ(sizes.size(), 3u);
  for (const uint64_t size : sizes) EXPECT_GT(size, 0u);
  EXPECT_EQ(TotalRows(client), 100u);
  ASSERT_TRUE(client.Clear(Soon()).ok());
  EXPECT_EQ(TotalRows(client), 0u);
}

TEST(ClusterTest, RowsThatDoNotFitTheirSignsAreRefused) {
  Cluster cluster(1);
  const std::vector<uint64_t> signs = {1, 2};
  const std::vector<float> rows = {1, 2, 3};
  EXPECT_EQ(cluster.client().SetEmbeddings(2, signs, rows, Soon()).code(),
            StatusCode::kInvalidArgument);
  const std::vector<float> bad = {1, 2, 3, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(cluster.client().SetEmbeddings(2, signs, bad, Soon()).code(),
            StatusCode::kInvalidArgument);
}

TEST(ClusterTest, StalenessCountsTheUpdatesInBetween) {
  Cluster cluster(2);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  const auto slow = Must(client.LookupDirect(0, Batch(0), true, Soon()));
  for (uint32_t step = 1; step <= 2; ++step) {
    const auto fast = Must(client.LookupDirect(0, Batch(step), true, Soon()));
    const Gradients gradients(fast);
    const auto report = Must(client.ReturnGradients(fast.reference, 1.0f, gradients.slots, Soon()));
    EXPECT_EQ(report.update.staleness, 0u);
  }
  const Gradients gradients(slow);
  const auto report = Must(client.ReturnGradients(slow.reference, 1.0f, gradients.slots, Soon()));
  EXPECT_EQ(report.update.staleness, 2u);
}

TEST(ClusterTest, GradientsAreAppliedOnceHoweverOftenTheyAreSent) {
  Cluster cluster(2);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  const auto result = Must(client.LookupDirect(0, Batch(0), true, Soon()));
  const Gradients gradients(result);
  const auto first = Must(client.ReturnGradients(result.reference, 1.0f, gradients.slots, Soon()));
  const auto trained = Take(Must(client.LookupDirect(0, Batch(0), false, Soon())));
  const auto second = Must(client.ReturnGradients(result.reference, 1.0f, gradients.slots, Soon()));
  EXPECT_EQ(second.update.num_updated, first.update.num_updated);
  EXPECT_EQ(Take(Must(client.LookupDirect(0, Batch(0), false, Soon()))), trained);
}

TEST(ClusterTest, SkippedAndNonfiniteSlotsAreCounted) {
  Cluster cluster(2);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  const auto result = Must(client.LookupDirect(0, Batch(0), true, Soon()));
  Gradients gradients(result);
  gradients.slots[0].skipped = true;
  gradients.rows[1][0] = std::numeric_limits<float>::infinity();
  const auto report = Must(client.ReturnGradients(result.reference, 1.0f, gradients.slots, Soon()));
  EXPECT_EQ(report.num_skipped_slots, 1u);
  EXPECT_EQ(report.num_nonfinite_slots, 1u);
  EXPECT_GT(report.update.num_updated, 0u);
}

TEST(ClusterTest, AServerThatRestartsElsewhereIsConfiguredAgain) {
  Cluster cluster(3);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  const auto before = Must(client.LookupDirect(0, Batch(0), true, Soon()));
  cluster.StopServer(1);
  // The lookup waits for the server rather than failing while it is away.
  auto waiting = std::async(
      std::launch::async, [&] { return client.LookupDirect(0, Batch(1), true, Soon()).status(); });
  cluster.StartServer(1);
  const Status status = waiting.get();
  EXPECT_TRUE(status.ok()) << status.ToString();
  // The rows of that server are gone, and their gradients are counted as missing.
  const Gradients gradients(before);
  const auto report = Must(client.ReturnGradients(before.reference, 1.0f, gradients.slots, Soon()));
  EXPECT_GT(report.update.num_missing, 0u);
  EXPECT_GT(report.update.num_updated, 0u);
  EXPECT_EQ(report.update.staleness, 0u);
}

TEST(ClusterTest, AWorkerThatRestartedRefusesFormerReferences) {
  Cluster cluster(1);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  const BatchReference former = cluster.Register(Batch(0));
  cluster.StartWorker(0);
  EXPECT_EQ(client.Lookup(former, true, Soon()).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(client.Release(former, Soon()).code(), StatusCode::kNotFound);
  EXPECT_TRUE(client.Lookup(cluster.Register(Batch(0)), false, Soon()).ok());
}

TEST(ClusterTest, EveryWorkerIsConfiguredAndServesItsOwnBatches) {
  Cluster cluster(2, 2);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  const BatchReference second = cluster.Register(Batch(0), 1);
  EXPECT_EQ(Must(client.Lookup(second, true, Soon())).reference.worker_index, 1u);
  EXPECT_EQ(Must(client.LookupDirect(5, Batch(1), true, Soon())).reference.worker_index, 1u);
  EXPECT_TRUE(client.Release(second, Soon()).ok());
  // Both keep the configuration for servers that restart.
  for (const uint32_t worker : {0u, 1u}) {
    cluster.StopServer(0);
    cluster.StartServer(0);
    EXPECT_TRUE(client.LookupDirect(worker, Batch(2), true, Soon()).ok()) << "worker " << worker;
  }
}

TEST(ClusterTest, ThereIsNoWorkerPastTheLast) {
  Cluster cluster(1);
  const BatchReference reference{{2, 3}, 1};
  EXPECT_EQ(cluster.client().Lookup(reference, true, Soon()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.client().Release(reference, Soon()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.client().SetWorker(65536, "127.0.0.1:1").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(RemoteClient::Create(0).status().code(), StatusCode::kInvalidArgument);
}

TEST(ClusterTest, ConcurrentTrainersLeaveNothingBehind) {
  Cluster cluster(2);
  RemoteClient& client = cluster.client();
  ASSERT_TRUE(client.Configure(Adam(), false, Soon()).ok());
  std::vector<std::thread> trainers;
  for (int i = 0; i < 4; ++i) {
    trainers.emplace_back([&] {
      testing::Train(
          client, [&](std::span<const std::byte> batch) { return cluster.Register(batch); }, 5);
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  const Metrics stats = cluster.worker(0).metrics();
  EXPECT_EQ(stats["num_registered"], 20u);
  EXPECT_EQ(stats["num_returned"], 20u);
  EXPECT_EQ(stats["num_in_flight"], 0u);
  EXPECT_EQ(stats["num_buffered"], 0u);
}

}  // namespace
}  // namespace persia::client

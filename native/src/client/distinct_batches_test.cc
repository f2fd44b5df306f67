// Slots as distinct rows between a rank and its embedding worker, against a real cluster.
#include "client/distinct_batches.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "client/test_support.h"

namespace persia::client {
namespace {

using testing::Adam;
using testing::Batch;
using testing::Cluster;
using testing::Gradients;
using testing::Must;
using testing::Snapshot;
using testing::Soon;
using testing::Take;

constexpr uint32_t kJobBatchSize = 300;  // of 40 different IDs, so that rows are fewer
constexpr uint32_t kJobSteps = 6;

// What a job saw, and what became of its gradients.
struct JobHistory {
  std::vector<Snapshot> snapshots;
  std::vector<std::pair<uint64_t, uint32_t>> reports;
  bool operator==(const JobHistory&) const = default;
};

// Each third step has a NaN in one slot and large numbers in another. `returns` gets the gradients.
JobHistory TrainJob(EmbeddingClient& client, EmbeddingClient& returns,
                    const testing::Register& add) {
  JobHistory history;
  for (uint32_t step = 0; step < kJobSteps; ++step) {
    const auto reference = add(Batch(step, kJobBatchSize));
    const LookupResult result = Must(client.Lookup(reference, true, Soon()));
    history.snapshots.push_back(Take(result));
    Gradients gradients(result);
    if (step % 3 == 2) {
      gradients.rows[0].back() = std::numeric_limits<float>::quiet_NaN();
      gradients.rows[1].back() = 1e38f;
    }
    const auto report =
        Must(returns.ReturnGradients(result.reference, 2.0f, gradients.slots, Soon()));
    history.reports.emplace_back(report.update.num_updated, report.num_nonfinite_slots);
  }
  return history;
}

JobHistory TrainInOneProcess() {
  const auto client = Must(EmbeddedClient::Create(testing::Slots(), testing::StoreOptions()));
  EXPECT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  return TrainJob(*client, *client, [&](auto batch) { return Must(client->Register(0, batch)); });
}

TEST(DistinctRowsClusterTest, TrainsBitForBitLikeTheEmbeddedClient) {
  const JobHistory embedded = TrainInOneProcess();
  EXPECT_GT(embedded.reports[2].second, 1u);
  for (const uint32_t num_servers : {1u, 3u}) {
    Cluster cluster(num_servers);
    ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
    EXPECT_EQ(TrainJob(cluster.client(), cluster.client(),
                       [&](auto batch) { return cluster.Register(batch); }),
              embedded);
    // All slots but the raw one.
    EXPECT_EQ(cluster.worker(0).metrics()["num_slots_as_rows"], 3 * kJobSteps);
    EXPECT_GT(cluster.worker(0).metrics()["embedding_bytes_saved"], 0u);
    for (const auto& slot : cluster.worker(0).slot_stats()) {
      EXPECT_EQ(slot.metrics["num_as_rows"], slot.name == "items" ? 0 : kJobSteps) << slot.name;
    }
    EXPECT_EQ(cluster.client().distinct_batches().num_batches(), 0u);
    EXPECT_EQ(cluster.client().distinct_batches().num_bytes(), 0u);
  }
}

// As a client does that has forgotten the batch: it returns gradients that it cannot sum.
TEST(DistinctRowsClusterTest, AForgottenBatchReturnsUnsummedGradients) {
  Cluster cluster(2);
  const auto other = cluster.NewClient();
  ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  EXPECT_EQ(TrainJob(cluster.client(), *other, [&](auto batch) { return cluster.Register(batch); }),
            TrainInOneProcess());
  EXPECT_EQ(cluster.client().distinct_batches().num_batches(), kJobSteps);
}

// A repetition finds the batch's report, whatever it sends.
TEST(DistinctRowsClusterTest, ARepeatedReturnIsAppliedOnce) {
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  const auto reference = cluster.Register(Batch(0, kJobBatchSize));
  const LookupResult result = Must(cluster.client().Lookup(reference, true, Soon()));
  const Gradients gradients(result);
  const auto give_back = [&] {
    return Must(cluster.client().ReturnGradients(reference, 1.0f, gradients.slots, Soon()));
  };
  const auto first = give_back();
  EXPECT_EQ(give_back().update.num_updated, first.update.num_updated);
  EXPECT_EQ(cluster.worker(0).metrics()["num_returned"], 1u);
}

TEST(DistinctRowsClusterTest, AReleasedBatchIsForgotten) {
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  const auto reference = cluster.Register(Batch(0, kJobBatchSize));
  Must(cluster.client().Lookup(reference, true, Soon()));
  EXPECT_EQ(cluster.client().distinct_batches().num_batches(), 1u);
  EXPECT_TRUE(cluster.client().Release(reference, Soon()).ok());
  EXPECT_EQ(cluster.client().distinct_batches().num_batches(), 0u);
}

// Evaluation pools here as well, and keeps nothing.
TEST(DistinctRowsClusterTest, InferenceKeepsNoBatch) {
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  const auto result =
      Must(cluster.client().LookupDirect(0, Batch(0, kJobBatchSize), false, Soon()));
  EXPECT_EQ(result.distinct.size(), 3u);
  EXPECT_EQ(cluster.client().distinct_batches().num_batches(), 0u);
}

// Rounded, embeddings pooled from rows would differ from those that are pooled and then rounded.
TEST(DistinctRowsClusterTest, SlotsOf16BitsAFloatStayPooled) {
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().Configure(Adam(), false, Soon()).ok());
  const auto client = cluster.NewClient(worker::WireDtype::kFloat16);
  const auto result = Must(client->LookupDirect(0, Batch(0, kJobBatchSize), true, Soon()));
  EXPECT_TRUE(result.distinct.empty());
  EXPECT_EQ(cluster.worker(0).metrics()["num_slots_as_rows"], 0u);
  const Gradients gradients(result);
  EXPECT_GT(Must(client->ReturnGradients(result.reference, 1.0f, gradients.slots, Soon()))
                .update.num_updated,
            0u);
}

worker::DistinctSlot NamedSlot(const std::string& name, size_t num_numbers) {
  worker::DistinctSlot slot;
  slot.name = name;
  slot.numbers.assign(num_numbers, 0);
  return slot;
}

std::vector<worker::DistinctSlot> NamedSlots(std::vector<std::pair<std::string, size_t>> sizes) {
  std::vector<worker::DistinctSlot> slots;
  for (const auto& [name, size] : sizes) slots.push_back(NamedSlot(name, size));
  return slots;
}

TEST(DistinctBatchesTest, SlotsOfLaterLookupsJoinThoseOfEarlierOnes) {
  DistinctBatches batches;
  const BatchReference reference{{1, 2}, 0};
  batches.Keep(reference, NamedSlots({{"a", 1}, {"b", 1}}));
  batches.Keep(reference, NamedSlots({{"b", 7}, {"c", 1}}));
  batches.Keep(reference, {});
  const auto slots = batches.Find(reference);
  ASSERT_EQ(slots.size(), 3u);
  EXPECT_EQ(slots[0]->name, "a");
  EXPECT_EQ(slots[1]->numbers.size(), 7u);
  EXPECT_EQ(slots[2]->name, "c");
  EXPECT_TRUE(batches.Find({{2, 2}, 0}).empty());  // of the worker's next life
  EXPECT_TRUE(batches.Find({{1, 2}, 1}).empty());
  batches.Forget(reference);
  EXPECT_EQ(batches.num_bytes(), 0u);
}

TEST(DistinctBatchesTest, TheOldestAreForgottenBeyondTheBound) {
  DistinctBatches batches(100'000);
  for (uint64_t i = 1; i <= 20; ++i) batches.Keep({{1, i}, 0}, NamedSlots({{"a", 5'000}}));
  EXPECT_EQ(batches.num_batches(), 4u);  // of 20,000 bytes and a little
  EXPECT_LE(batches.num_bytes(), 100'000u);
  EXPECT_TRUE(batches.Find({{1, 16}, 0}).empty());
  EXPECT_EQ(batches.Find({{1, 17}, 0}).size(), 1u);
}

}  // namespace
}  // namespace persia::client

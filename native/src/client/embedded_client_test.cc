// EmbeddedClient: what is its own. That it trains like a cluster: client/cluster_test.cc.
#include <gtest/gtest.h>

#include <limits>

#include "client/test_support.h"

namespace persia::client {
namespace {

using worker::SlotEmbedding;

using testing::Adam;
using testing::Batch;
using testing::Gradients;
using testing::Must;
using testing::Soon;
using testing::Take;

std::shared_ptr<EmbeddedClient> MakeClient() {
  return Must(EmbeddedClient::Create(testing::Slots(), testing::StoreOptions()));
}

TEST(EmbeddedClientTest, RefusesWhatWorkerAndStoreRefuse) {
  EXPECT_EQ(EmbeddedClient::Create({}, testing::StoreOptions()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(EmbeddedClient::Create(testing::Slots(), {.capacity = 0}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(EmbeddedClientTest, ABatchFromRegistrationToItsGradients) {
  const auto client = MakeClient();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const BatchReference reference = Must(client->Register(0, Batch(0)));
  EXPECT_EQ(reference.worker_index, 0u);
  const auto result = Must(client->Lookup(reference, true, Soon()));
  EXPECT_EQ(result.reference.reference, reference.reference);
  EXPECT_EQ(result.reference.worker_incarnation, reference.worker_incarnation);
  const Gradients gradients(result);
  const auto report =
      Must(client->ReturnGradients(result.reference, 1.0f, gradients.slots, Soon()));
  EXPECT_GT(report.update.num_updated, 0u);
  EXPECT_EQ(report.update.num_missing, 0u);
  EXPECT_NE(Take(Must(client->LookupDirect(0, Batch(0), false, Soon()))), Take(result));
  EXPECT_EQ(client->Lookup(reference, true, Soon()).status().code(), StatusCode::kNotFound);
}

TEST(EmbeddedClientTest, StalenessCountsTheUpdatesInBetween) {
  const auto client = MakeClient();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const auto slow = Must(client->LookupDirect(0, Batch(0), true, Soon()));
  const auto fast = Must(client->LookupDirect(0, Batch(1), true, Soon()));
  const Gradients of_fast(fast);
  EXPECT_EQ(
      Must(client->ReturnGradients(fast.reference, 1.0f, of_fast.slots, Soon())).update.staleness,
      0u);
  const Gradients of_slow(slow);
  EXPECT_EQ(
      Must(client->ReturnGradients(slow.reference, 1.0f, of_slow.slots, Soon())).update.staleness,
      1u);
}

// Slots 0 to 3 have the modes 1, 0, 2, 0.
std::shared_ptr<EmbeddedClient> MakeClientWithModes() {
  worker::WorkerOptions options = testing::Slots();
  options.slots[0].mode = 1;
  options.slots[2].mode = 2;
  return Must(EmbeddedClient::Create(options, testing::StoreOptions()));
}

std::vector<float> RowsOf(const SlotEmbedding& slot) {
  return {slot.rows, slot.rows + size_t{slot.num_rows} * slot.dim};
}

TEST(EmbeddedClientTest, ItsModesAreTheBatch) {
  const auto client = MakeClientWithModes();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const auto first = Must(client->LookupDirect(0, Batch(0), true, Soon(), 1));
  const auto others = Must(client->Lookup(first.reference, true, Soon(), 2 | 4));
  const auto all = Must(client->Lookup(first.reference, true, Soon()));
  ASSERT_EQ(first.slots.size(), all.slots.size());
  ASSERT_EQ(others.slots.size(), all.slots.size());
  for (size_t i = 0; i < all.slots.size(); ++i) {
    EXPECT_EQ(first.slots[i].absent, i == 0 || i == 2);
    EXPECT_EQ(others.slots[i].absent, i == 1 || i == 3);
    const SlotEmbedding& slot = first.slots[i].absent ? others.slots[i] : first.slots[i];
    EXPECT_EQ(slot.name, all.slots[i].name);
    EXPECT_EQ(RowsOf(slot), RowsOf(all.slots[i]));
  }
}

TEST(EmbeddedClientTest, EachPartHasAStalenessOfItsOwn) {
  const auto client = MakeClientWithModes();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const auto slow = Must(client->LookupDirect(0, Batch(0), true, Soon(), 1));
  const auto update = [&](uint32_t step) {
    const auto other = Must(client->LookupDirect(0, Batch(step), true, Soon()));
    const Gradients of_other(other);
    Must(client->ReturnGradients(other.reference, 1.0f, of_other.slots, Soon()));
  };
  update(1);
  Must(client->Lookup(slow.reference, true, Soon(), 4));
  update(2);
  Must(client->Lookup(slow.reference, true, Soon(), 2));
  update(3);
  Must(client->Lookup(slow.reference, true, Soon(), 2));  // the later one counts
  update(4);
  Gradients gradients(slow);
  std::erase_if(gradients.slots, [](const auto& slot) { return slot.num_rows == 0; });  // absent
  const auto report = Must(client->ReturnGradients(slow.reference, 1.0f, gradients.slots, Soon()));
  EXPECT_EQ(report.update.staleness, 4u);
  ASSERT_EQ(report.lookups.size(), 3u);
  const uint32_t slots[] = {1, 4, 2};  // in the order of their lookups
  const uint64_t staleness[] = {4, 3, 1};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(report.lookups[i].slots, slots[i]);
    EXPECT_EQ(report.lookups[i].staleness, staleness[i]);
  }
}

TEST(EmbeddedClientTest, ALookupOfAllTakesThePlaceOfThoseOfSome) {
  const auto client = MakeClientWithModes();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const auto first = Must(client->LookupDirect(0, Batch(0), true, Soon(), 1));
  Must(client->Lookup(first.reference, true, Soon(), 2));
  const auto all = Must(client->Lookup(first.reference, true, Soon()));
  const Gradients gradients(all);
  const auto report = Must(client->ReturnGradients(all.reference, 1.0f, gradients.slots, Soon()));
  ASSERT_EQ(report.lookups.size(), 1u);
  EXPECT_EQ(report.lookups[0].slots, ~0u);
}

TEST(EmbeddedClientTest, SomeSlotsAreLookedUpForInference) {
  const auto client = MakeClientWithModes();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const auto trained = Must(client->LookupDirect(0, Batch(0), true, Soon()));
  const auto some = Must(client->LookupDirect(0, Batch(0), false, Soon(), 1));
  EXPECT_EQ(some.reference.reference, 0u);
  ASSERT_EQ(some.slots.size(), trained.slots.size());
  for (size_t i = 0; i < some.slots.size(); ++i) {
    EXPECT_EQ(some.slots[i].absent, i == 0 || i == 2);
    if (some.slots[i].absent) continue;
    EXPECT_EQ(RowsOf(some.slots[i]), RowsOf(trained.slots[i]));
  }
}

TEST(EmbeddedClientTest, TrainingNeedsAConfiguration) {
  const auto client = MakeClient();
  EXPECT_EQ(client->LookupDirect(0, Batch(0), true, Soon()).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_TRUE(client->LookupDirect(0, Batch(0), false, Soon()).ok());
}

TEST(EmbeddedClientTest, RowsAreSetCountedAndCleared) {
  const auto client = MakeClient();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const std::vector<uint64_t> signs = {1, 2, 3};
  const std::vector<float> rows(6, 0.25f);
  ASSERT_TRUE(client->SetEmbeddings(2, signs, rows, Soon()).ok());
  EXPECT_EQ(Must(client->Sizes(Soon())), std::vector<uint64_t>{3});
  ASSERT_TRUE(client->Clear(Soon()).ok());
  EXPECT_EQ(Must(client->Sizes(Soon())), std::vector<uint64_t>{0});
}

TEST(EmbeddedClientTest, RefusesTheRowsThatAServerRefuses) {
  const auto client = MakeClient();
  ASSERT_TRUE(client->Configure(Adam(), false, Soon()).ok());
  const std::vector<uint64_t> signs = {1};
  const std::vector<float> bad = {1.0f, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(client->SetEmbeddings(2, signs, bad, Soon()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->SetEmbeddings(3, signs, bad, Soon()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client->SetEmbeddings(0, signs, {}, Soon()).code(), StatusCode::kInvalidArgument);
}

TEST(EmbeddedClientTest, ACallPastItsDeadlineIsNotBegun) {
  const auto client = MakeClient();
  const Deadline past = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  EXPECT_EQ(client->Configure(Adam(), false, past).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(client->LookupDirect(0, Batch(0), false, past).status().code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_EQ(client->Clear(past).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(client->Sizes(past).status().code(), StatusCode::kDeadlineExceeded);
}

TEST(EmbeddedClientTest, ClientsShareNothing) {
  const auto one = MakeClient();
  const auto other = MakeClient();
  ASSERT_TRUE(one->Configure(Adam(), false, Soon()).ok());
  const BatchReference reference = Must(one->Register(0, Batch(0)));
  EXPECT_EQ(other->Lookup(reference, true, Soon()).status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(one->Lookup(reference, true, Soon()).ok());
  EXPECT_GT(Must(one->Sizes(Soon()))[0], 0u);
  EXPECT_EQ(Must(other->Sizes(Soon()))[0], 0u);
}

}  // namespace
}  // namespace persia::client

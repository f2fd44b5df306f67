// Admission by the number of sightings: the filter by itself, and through the store.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "store/admission_filter.h"
#include "store/sign_index.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

TEST(AdmissionFilterTest, NeverCountsTooLowAndRarelyTooHigh) {
  AdmissionFilter filter;
  filter.Resize(1 << 16);
  EXPECT_EQ(filter.memory_bytes(), 1u << 16);
  constexpr uint64_t kSigns = 5000;
  uint64_t num_high = 0;
  for (uint32_t round = 1; round <= 4; ++round) {
    for (uint64_t sign = 0; sign < kSigns; ++sign) {
      const uint32_t count = filter.Count(SignKey(sign));
      ASSERT_GE(count, round);
      num_high += count > round ? 1 : 0;
    }
  }
  // A quarter of the cells is in use at the end: 1.5 % of signs share all three.
  EXPECT_LT(num_high, 4 * kSigns * 2 / 100);
}

TEST(AdmissionFilterTest, CountsUpTo255) {
  AdmissionFilter filter;
  filter.Resize(1024);
  for (uint32_t i = 1; i <= 300; ++i) EXPECT_EQ(filter.Count(7), std::min(i, 255u));
  filter.Clear();
  EXPECT_EQ(filter.Count(7), 1u);
}

TEST(AdmissionFilterTest, ForgetsSignsSeenOnceBeforeItIsFull) {
  AdmissionFilter filter;
  filter.Resize(1024);
  uint64_t num_early = 0;
  for (uint64_t sign = 0; sign < 100'000; ++sign) {
    num_early += filter.Count(SignKey(sign)) > 1 ? 1 : 0;
  }
  // Of a third of the cells in use: 1 in 27 at the worst moment.
  EXPECT_LT(num_early, 100'000u / 27);
  EXPECT_EQ(filter.memory_bytes(), 1024u);
}

TrainConfig AdmitAfter(uint32_t count) {
  TrainConfig config = SgdConfig();
  config.initializer = {.lower = 1.0f, .upper = 1.0f};
  config.admit_after = count;
  return config;
}

TEST(AdmitAfterTest, TheRowComesWithTheNthTrainingBatch) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 4}, AdmitAfter(3));
  for (int batch = 1; batch <= 2; ++batch) {
    LookupReport report;
    EXPECT_EQ(Lookup(*store, {7}, 2, LookupMode::kTrain, &report), (std::vector<float>{0, 0}));
    EXPECT_EQ(report.num_unadmitted, 1u);
    EXPECT_EQ(Update(*store, {7}, 2, {1, 1}).num_missing, 1u) << "its gradient is dropped";
    EXPECT_EQ(Peek(*store, {7}, 2), (std::vector<float>{0, 0})) << "not counted as a sighting";
  }
  EXPECT_EQ(store->size(), 0u);
  EXPECT_EQ(Lookup(*store, {7}, 2), (std::vector<float>{1, 1}));
  EXPECT_EQ(Update(*store, {7}, 2, {1, 1}).num_updated, 1u);
  EXPECT_EQ(Lookup(*store, {7}, 3), (std::vector<float>{1, 1, 1}))
      << "another dim: admitted before";
}

TEST(AdmitAfterTest, ClearForgetsCountsAndMemoryIsTakenOnlyWhereWanted) {
  auto plain = MakeStore({.capacity = 100, .num_internal_shards = 4}, AdmitAfter(1));
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 4}, AdmitAfter(2));
  EXPECT_EQ(store->stats().memory_bytes, plain->stats().memory_bytes + (16 << 20));
  Lookup(*store, {7}, 2);
  store->Clear();
  Lookup(*store, {7}, 2);
  EXPECT_EQ(store->size(), 0u);
  ASSERT_TRUE(store->Configure(AdmitAfter(1), /*replace=*/true).ok());
  EXPECT_LT(store->stats().memory_bytes, 10'000u);
}

TEST(AdmitAfterTest, PretrainedRowsAndProbabilityAreApartFromIt) {
  TrainConfig config = AdmitAfter(2);
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1}, config);
  ASSERT_TRUE(SetRows(*store, {7}, 1, {5}).ok());
  EXPECT_EQ(Lookup(*store, {7}, 1), (std::vector<float>{5}));
  config.admit_probability = 0.0f;
  ASSERT_TRUE(store->Configure(config, /*replace=*/true).ok());
  for (int batch = 0; batch < 5; ++batch) Lookup(*store, {8}, 1);
  EXPECT_EQ(store->size(), 1u);
}

}  // namespace
}  // namespace persia::store

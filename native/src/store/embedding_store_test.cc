// Lookups, updates, eviction, admission and set rows:
// the contract of EmbeddingStore, point by point.
#include "store/embedding_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "store/store_test_util.h"

namespace persia::store {
namespace {

TEST(LookupTest, RefusesImpossibleDims) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2});
  const std::vector<uint64_t> signs = {1};
  float row;
  for (uint32_t dim : {0u, kMaxDim + 1}) {
    const RowBlock block = {.dim = dim, .signs = signs};
    const Status status = store->Lookup({&block, 1}, LookupMode::kTrain, &row);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(std::to_string(dim)), std::string::npos);
  }
  EXPECT_EQ(Lookup(*store, {1}, kMaxDim).size(), kMaxDim);
}

TEST(LookupTest, InitialValuesDependOnSignAndSeedAlone) {
  const auto signs = Range(0, 500);
  auto reference = MakeStore({.capacity = 10'000, .num_internal_shards = 1});
  const auto expected = Lookup(*reference, signs, 5);
  std::vector<uint64_t> shuffled = signs;
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(1));
  auto other = MakeStore({.capacity = 10'000, .num_internal_shards = 7});
  Lookup(*other, {99'999}, 5);
  for (uint64_t sign : shuffled) Lookup(*other, {sign}, 5);
  EXPECT_EQ(Peek(*other, signs, 5), expected);

  TrainConfig reseeded = SgdConfig();
  reseeded.initializer.seed = 1;
  auto seeded = MakeStore({.capacity = 10'000, .num_internal_shards = 1}, reseeded);
  EXPECT_NE(Lookup(*seeded, signs, 5), expected);
  for (float value : expected) EXPECT_TRUE(value >= -0.01f && value < 0.01f) << value;
}

TEST(LookupTest, BlocksOfSeveralDimsAreLaidOutOneAfterTheOther) {
  auto store = MakeStore({.capacity = 10'000, .num_internal_shards = 3});
  const auto a = Range(0, 10), none = Range(0, 0), b = Range(100, 107), c = Range(200, 203);
  std::vector<float> expected;
  for (const auto& part : {Lookup(*store, a, 2), Lookup(*store, b, 16), Lookup(*store, c, 2)}) {
    expected.insert(expected.end(), part.begin(), part.end());
  }
  const std::vector<RowBlock> blocks = {{.dim = 2, .signs = a},
                                        {.dim = 9, .signs = none},
                                        {.dim = 16, .signs = b},
                                        {.dim = 2, .signs = c}};
  std::vector<float> rows(expected.size());
  LookupReport report;
  ASSERT_TRUE(store->Lookup(blocks, LookupMode::kTrain, rows.data(), &report).ok());
  EXPECT_EQ(rows, expected);
  EXPECT_EQ(report.num_missing, 0u);
  ASSERT_TRUE(store->Lookup({}, LookupMode::kTrain, nullptr, &report).ok());
}

TEST(LookupTest, InferenceNeverInsertsNorReorders) {
  auto store = MakeStore({.capacity = 3, .num_internal_shards = 1});
  for (uint64_t sign : {1, 2, 3}) Lookup(*store, {sign}, 4);
  LookupReport report;
  const auto rows = Lookup(*store, {9}, 4, LookupMode::kInference, &report);
  EXPECT_EQ(rows, std::vector<float>(4, 0.0f));
  EXPECT_EQ(report.num_missing, 1u);
  EXPECT_EQ(store->size(), 3u);
  Peek(*store, {1}, 4);  // must not save 1 from being the oldest
  Lookup(*store, {4}, 4);
  EXPECT_FALSE(Has(*store, 1));
  EXPECT_TRUE(Has(*store, 2));
}

TEST(LookupTest, EvictsInTheOrderOfTheLastTouch) {
  auto store = MakeStore({.capacity = 4, .num_internal_shards = 1});
  Lookup(*store, {1, 2, 3, 4}, 4);
  Lookup(*store, {4}, 4);
  Lookup(*store, {2}, 4);
  Lookup(*store, {1}, 4);  // now 3, 4, 2, 1 from old to new
  LookupReport report;
  for (const auto& [inserted, evicted] :
       {std::pair<uint64_t, uint64_t>{10, 3}, {11, 4}, {12, 2}, {13, 1}, {14, 10}}) {
    EXPECT_TRUE(Has(*store, evicted)) << evicted;
    Lookup(*store, {inserted}, 4, LookupMode::kTrain, &report);
    EXPECT_EQ(report.num_evicted, 1u);
    EXPECT_FALSE(Has(*store, evicted)) << evicted;
    EXPECT_EQ(store->size(), 4u);
  }
}

TEST(LookupTest, ABatchLargerThanTheCapacityIsReadAndFillsTheStore) {
  auto store = MakeStore({.capacity = 10, .num_internal_shards = 1});
  const auto rows = Lookup(*store, Range(0, 1000), 4);
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 0.0f), 0) << "every row was read";
  EXPECT_EQ(store->size(), 10u);
  size_t num_kept = 0;
  for (uint64_t sign = 0; sign < 1000; ++sign) num_kept += Has(*store, sign) ? 1 : 0;
  EXPECT_EQ(num_kept, 10u);
}

// Callers send distinct signs; what the network sends must not break the store all the same.
TEST(LookupTest, RepeatedSignsDoNoHarm) {
  for (uint64_t capacity : {1, 2, 10}) {
    auto store = MakeStore({.capacity = capacity, .num_internal_shards = 1});
    const auto rows = Lookup(*store, {1, 2, 1, 1, 2, 3, 1}, 1);
    EXPECT_EQ(rows[0], rows[2]);
    EXPECT_EQ(rows[1], rows[4]);
    EXPECT_EQ(store->size(), std::min<uint64_t>(capacity, 3));
    Lookup(*store, Range(0, 100), 1);
    EXPECT_EQ(store->size(), capacity);
    EXPECT_TRUE(Has(*store, 99, 1));
  }
}

TEST(LookupTest, CapacityIsExactOverShards) {
  auto store = MakeStore({.capacity = 103, .num_internal_shards = 10});
  Lookup(*store, Range(0, 5000), 4);
  EXPECT_EQ(store->size(), 103u);
}

TEST(LookupTest, AnotherDimMakesTheRowAnew) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1});
  auto fresh = MakeStore({.capacity = 100, .num_internal_shards = 1});
  Lookup(*store, {1, 2}, 4);
  EXPECT_EQ(Peek(*store, {1}, 8), std::vector<float>(8, 0.0f)) << "inference changes nothing";
  EXPECT_EQ(Update(*store, {1}, 8, std::vector<float>(8, 1.0f)).num_missing, 1u);
  LookupReport report;
  EXPECT_EQ(Lookup(*store, {1}, 8, LookupMode::kTrain, &report), Lookup(*fresh, {1}, 8));
  EXPECT_EQ(report.num_inserted, 1u);
  EXPECT_EQ(report.num_evicted, 0u);
  EXPECT_EQ(store->size(), 2u);
  EXPECT_FALSE(Has(*store, 1, 4));
}

TEST(LookupTest, AnotherDimResetsTheOptimizerState) {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdam;
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1}, config);
  auto fresh = MakeStore({.capacity = 100, .num_internal_shards = 1}, config);
  Lookup(*store, {1}, 4);
  for (int i = 0; i < 5; ++i) Update(*store, {1}, 4, {1, 2, 3, 4});
  Lookup(*store, {1}, 8);
  Lookup(*store, {1}, 4);  // takes the cell that the first row had
  Lookup(*fresh, {1}, 4);
  for (EmbeddingStore* s : {store.get(), fresh.get()}) Update(*s, {1}, 4, {1, -1, 1, -1});
  EXPECT_EQ(Peek(*store, {1}, 4), Peek(*fresh, {1}, 4));
}

// The published system shifted every later gradient of a request that had a missing sign.
TEST(UpdateTest, MissingSignSkipsExactlyItsOwnGradient) {
  auto store = MakeStore({.capacity = 1000, .num_internal_shards = 4});
  const auto signs = Range(0, 100);
  std::vector<uint64_t> present;
  for (uint64_t sign : signs) {
    if (sign % 3 != 0) present.push_back(sign);
  }
  Lookup(*store, present, 2);
  const auto before = Peek(*store, signs, 2);
  std::vector<float> gradients;
  for (uint64_t sign : signs) {
    gradients.push_back(0.01f * static_cast<float>(sign));
    gradients.push_back(-0.02f * static_cast<float>(sign));
  }
  const UpdateReport report = Update(*store, signs, 2, gradients);
  EXPECT_EQ(report.num_updated, present.size());
  EXPECT_EQ(report.num_missing, signs.size() - present.size());
  const auto after = Peek(*store, signs, 2);
  for (size_t i = 0; i < after.size(); ++i) {
    const float expected = signs[i / 2] % 3 == 0 ? 0.0f : before[i] - gradients[i];
    EXPECT_EQ(after[i], expected) << "sign " << signs[i / 2];
  }
}

TEST(UpdateTest, WeightBoundHoldsAfterEachUpdateAndZeroMeansNone) {
  TrainConfig config = SgdConfig();
  config.weight_bound = 0.5f;
  auto store = MakeStore({.capacity = 10, .num_internal_shards = 1}, config);
  Lookup(*store, {1}, 3);
  Update(*store, {1}, 3, {-100.0f, 100.0f, 0.0f});
  auto row = Peek(*store, {1}, 3);
  EXPECT_EQ(row[0], 0.5f);
  EXPECT_EQ(row[1], -0.5f);
  EXPECT_LT(std::abs(row[2]), 0.01f);
  config.weight_bound = 0.0f;
  ASSERT_TRUE(store->Configure(config, /*replace=*/true).ok());
  Update(*store, {1}, 3, {-100.0f, 0.0f, 0.0f});
  EXPECT_EQ(Peek(*store, {1}, 3)[0], 100.5f);
}

TEST(UpdateTest, DoesNotTouchTheOrder) {
  auto store = MakeStore({.capacity = 2, .num_internal_shards = 1});
  for (uint64_t sign : {1, 2}) Lookup(*store, {sign}, 4);
  Update(*store, {1}, 4, {1, 1, 1, 1});
  Lookup(*store, {3}, 4);
  EXPECT_FALSE(Has(*store, 1));
}

TEST(AdmissionTest, AdmitsTheGivenShareDecidedBySignAndSeed) {
  TrainConfig config = SgdConfig();
  config.admit_probability = 0.3f;
  const auto signs = Range(0, 20'000);
  auto store = MakeStore({.capacity = 100'000, .num_internal_shards = 16}, config);
  LookupReport report;
  const auto rows = Lookup(*store, signs, 2, LookupMode::kTrain, &report);
  EXPECT_NEAR(static_cast<double>(store->size()), 6000, 6 * std::sqrt(20'000 * 0.3 * 0.7));
  EXPECT_EQ(report.num_missing, 20'000u);
  EXPECT_EQ(report.num_inserted, store->size());
  EXPECT_EQ(report.num_unadmitted, 20'000u - store->size());
  for (size_t i = 0; i < signs.size(); ++i) {
    EXPECT_EQ(rows[2 * i] != 0 || rows[2 * i + 1] != 0, Has(*store, signs[i], 2));
  }
  const auto again = Lookup(*store, signs, 2, LookupMode::kTrain, &report);
  EXPECT_EQ(again, rows) << "asking again does not get a sign in";
  auto other = MakeStore({.capacity = 100'000, .num_internal_shards = 3}, config);
  EXPECT_EQ(Lookup(*other, signs, 2), rows) << "the same signs everywhere";
}

TEST(AdmissionTest, ProbabilityZeroAdmitsNone) {
  TrainConfig config = SgdConfig();
  config.admit_probability = 0.0f;
  auto store = MakeStore({.capacity = 1000, .num_internal_shards = 2}, config);
  Lookup(*store, Range(0, 500), 2);
  EXPECT_EQ(store->size(), 0u);
  ASSERT_TRUE(SetRows(*store, {7}, 2, {1, 2}).ok());
  EXPECT_EQ(Peek(*store, {7}, 2), (std::vector<float>{1, 2})) << "rows set need no admission";
}

TEST(SetRowsTest, SetsValuesInsertsAndBeginsTheStateAnew) {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2}, config);
  Lookup(*store, {1}, 2);
  Update(*store, {1}, 2, {3, 3});
  ASSERT_TRUE(SetRows(*store, {1, 2}, 2, {1, 2, 1, 2}).ok());
  EXPECT_EQ(Peek(*store, {1, 2}, 2), (std::vector<float>{1, 2, 1, 2}));
  Update(*store, {1, 2}, 2, {1, 1, 1, 1});
  const auto rows = Peek(*store, {1, 2}, 2);
  EXPECT_EQ(rows[0], rows[2]) << "sign 1 kept no accumulator";
  EXPECT_NEAR(rows[0], 1 - 0.01, 1e-6);
}

TEST(SetRowsTest, TouchesAndEvictsLikeATrainingLookup) {
  auto store = MakeStore({.capacity = 2, .num_internal_shards = 1});
  Lookup(*store, {1, 2}, 1);
  ASSERT_TRUE(SetRows(*store, {1, 3}, 1, {5, 6}).ok());
  EXPECT_TRUE(Has(*store, 1, 1));
  EXPECT_FALSE(Has(*store, 2, 1));
  EXPECT_EQ(store->stats().lookups.num_evicted, 1u);
}

}  // namespace
}  // namespace persia::store

// Feature groups with rules of their own, through the store: the sign's top bits choose them.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "store/in_place_rows.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

constexpr uint64_t Sign(uint64_t group, uint64_t id) { return group << 56 | id; }

Initializer Constant(float value) { return {.lower = value, .upper = value}; }

// Group 1: Adam; group 2: SGD with momentum, rows begin at 3; all others: row-wise Adagrad at 1.
TrainConfig ThreeRules() {
  TrainConfig config;
  config.optimizer = OptimizerConfig::Of(OptimizerKind::kRowwiseAdagrad);
  config.optimizer.lr = 0.5f;
  config.initializer = Constant(1.0f);
  config.feature_index_prefix_bit = 8;
  RowConfig adam, sgd;
  adam.optimizer = OptimizerConfig::Of(OptimizerKind::kAdam);
  adam.optimizer.lr = 0.25f;
  adam.initializer = Constant(2.0f);
  sgd.optimizer.lr = 0.125f;
  sgd.optimizer.momentum = 0.5f;
  sgd.initializer = Constant(3.0f);
  sgd.weight_bound = 2.9f;
  config.groups = {{1, adam}, {2, sgd}};
  return config;
}

// With a gradient of 1 in every element, twice.
const std::vector<float> kExpected = {
    // Adam: a full step each time.
    2.0f - 0.25f - 0.25f,
    // SGD: 3 - 0.125 is above the bound of 2.9 before it is not; then velocity 1.5.
    3.0f - 0.125f - 0.1875f,
    // Row-wise Adagrad from an accumulator of 0.01.
    1.0f - 0.5f / std::sqrt(1.01f) - 0.5f / std::sqrt(2.01f),
    // A number beyond the table has the common rules.
    1.0f - 0.5f / std::sqrt(1.01f) - 0.5f / std::sqrt(2.01f),
};
const std::vector<uint64_t> kSigns = {Sign(1, 7), Sign(2, 7), Sign(0, 7), Sign(200, 7)};

TEST(GroupRulesTest, EachRowFollowsItsGroup) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1}, ThreeRules());
  EXPECT_EQ(Lookup(*store, kSigns, 1), (std::vector<float>{2, 3, 1, 1}));
  for (int step = 0; step < 2; ++step) Update(*store, kSigns, 1, {1, 1, 1, 1});
  const auto rows = Peek(*store, kSigns, 1);
  for (size_t i = 0; i < kSigns.size(); ++i) EXPECT_NEAR(rows[i], kExpected[i], 1e-5) << i;
}

TEST(GroupRulesTest, RowsOfOneDimAndOtherStateDoNotMix) {
  auto store = MakeStore({.capacity = 4000, .num_internal_shards = 2}, ThreeRules());
  std::vector<uint64_t> signs;
  for (uint64_t id = 0; id < 900; ++id) signs.push_back(Sign(id % 3, id));
  Lookup(*store, signs, 5);
  for (int step = 0; step < 2; ++step) {
    Update(*store, signs, 5, std::vector<float>(signs.size() * 5, 1.0f));
  }
  const auto rows = Peek(*store, signs, 5);
  for (size_t i = 0; i < signs.size(); ++i) {
    const float expected = kExpected[i % 3 == 0 ? 2 : i % 3 - 1];
    for (size_t j = 0; j < 5; ++j) ASSERT_NEAR(rows[i * 5 + j], expected, 1e-5) << i;
  }
}

TEST(GroupRulesTest, InPlaceRowsFollowThemToo) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2}, ThreeRules());
  const float one = 1.0f, zero = 0.0f;
  for (const uint64_t group : {1u, 2u, 0u}) {
    const std::vector<uint64_t> signs = {Sign(group, 7)};
    std::vector<RowHandle> handles(1);
    std::vector<const float*> values(1);
    const SignRows rows = {1, signs, handles, values};
    std::vector<uint64_t> removals;
    {
      auto batch = InPlaceRows::Begin(*store, LookupMode::kTrain).value();
      std::vector<uint32_t> missing;
      batch.Find(rows, &zero, &missing);
      ASSERT_EQ(missing.size(), 1u);
      LookupReport report;
      const MissingRow row = {&rows, 0};
      ASSERT_TRUE(batch.Insert(batch.ShardOf(row), {&row, 1}, &report).ok());
      removals = batch.Removals();
    }
    const std::vector<const float*> gradients = {&one};
    for (int step = 0; step < 2; ++step) {
      auto batch = InPlaceRows::BeginUpdate(*store, removals);
      UpdateReport report;
      batch.Locate(rows);
      batch.Update(rows, gradients, &report);
      EXPECT_EQ(report.num_updated, 1u);
    }
    EXPECT_NEAR(Peek(*store, signs, 1)[0], kExpected[group == 0 ? 2 : group - 1], 1e-5) << group;
  }
}

TEST(GroupRulesTest, SetRowsBeginsTheStateOfTheGroup) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1}, ThreeRules());
  ASSERT_TRUE(SetRows(*store, kSigns, 1, {2, 3, 1, 1}).ok());
  for (int step = 0; step < 2; ++step) Update(*store, kSigns, 1, {1, 1, 1, 1});
  const auto rows = Peek(*store, kSigns, 1);
  for (size_t i = 0; i < kSigns.size(); ++i) EXPECT_NEAR(rows[i], kExpected[i], 1e-5) << i;
}

TEST(GroupRulesTest, ReplaceChangesARateAndRefusesAKindNamingTheGroup) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1}, ThreeRules());
  Lookup(*store, kSigns, 1);
  TrainConfig rate = ThreeRules(), kind = ThreeRules(), gone = ThreeRules(), bits = ThreeRules();
  rate.groups[1].rows.optimizer.lr = 1.0f;
  kind.groups[0].rows.optimizer = OptimizerConfig::Of(OptimizerKind::kAdamW);
  gone.groups.pop_back();
  bits.feature_index_prefix_bit = 9;
  EXPECT_EQ(store->Configure(rate).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(store->Configure(rate, /*replace=*/true).ok());
  const Status refused = store->Configure(kind, /*replace=*/true);
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("feature group 1: optimizer.kind"), std::string::npos)
      << refused.message();
  EXPECT_NE(store->Configure(gone, true).message().find("feature group 2"), std::string::npos);
  EXPECT_NE(store->Configure(bits, true).message().find("feature_index_prefix_bit"),
            std::string::npos);
  Update(*store, {Sign(2, 7)}, 1, {1});
  EXPECT_NEAR(Peek(*store, {Sign(2, 7)}, 1)[0], 2.0f, 1e-6);
}

TEST(GroupRulesTest, AFactorAloneIsNoChangeOfRows) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 1}, ThreeRules());
  Lookup(*store, kSigns, 1);
  TrainConfig config = ThreeRules();
  config.lr_factor = 0.5f;
  EXPECT_TRUE(store->Configure(config).ok());
}

}  // namespace
}  // namespace persia::store

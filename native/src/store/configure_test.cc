// Creating and configuring an EmbeddingStore.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "store/embedding_store.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

TEST(CreateTest, RefusesImpossibleOptionsNamingThem) {
  auto refusal = [](EmbeddingStore::Options options) {
    auto store = EmbeddingStore::Create(options);
    EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument);
    return store.status().message();
  };
  EXPECT_NE(refusal({.capacity = 0, .num_internal_shards = 1}).find("capacity"), std::string::npos);
  for (EmbeddingStore::Options options :
       {EmbeddingStore::Options{.capacity = 100, .num_internal_shards = 0},
        {.capacity = 3, .num_internal_shards = 4},
        {.capacity = 100'000, .num_internal_shards = 65'537}}) {
    EXPECT_NE(refusal(options).find("num_internal_shards"), std::string::npos);
  }
}

TEST(ConfigureTest, TrainingNeedsItAndInferenceReadsZerosWithoutIt) {
  auto store = EmbeddingStore::Create({.capacity = 100, .num_internal_shards = 2}).value();
  EXPECT_FALSE(store->config().has_value());
  EXPECT_EQ(Peek(*store, {1, 2}, 3), std::vector<float>(6, 0.0f));
  const std::vector<uint64_t> signs = {1};
  const RowBlock block = {.dim = 1, .signs = signs};
  float row = 5;
  EXPECT_EQ(store->Lookup({&block, 1}, LookupMode::kTrain, &row).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(store->SetRows({&block, 1}, &row).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Update(*store, {1}, 1, {1.0f}).num_missing, 1u) << "no rows: a gradient is skipped";
}

TEST(ConfigureTest, RefusesAnInvalidConfig) {
  auto store = EmbeddingStore::Create({}).value();
  EXPECT_EQ(store->Configure(SgdConfig(-1)).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(store->config().has_value());
}

TEST(ConfigureTest, SameAgainIsANoOpAndADifferentOneNeedsNoRows) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2});
  TrainConfig adam;
  adam.optimizer.kind = OptimizerKind::kAdam;
  EXPECT_TRUE(store->Configure(adam).ok()) << "without rows anything may change";
  EXPECT_TRUE(store->Configure(SgdConfig()).ok());
  const auto before = Lookup(*store, {1, 2, 3}, 4);
  EXPECT_TRUE(store->Configure(SgdConfig()).ok());
  const Status refused = store->Configure(SgdConfig(0.5f));
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("lr"), std::string::npos);
  EXPECT_EQ(store->config(), SgdConfig());
  EXPECT_EQ(Peek(*store, {1, 2, 3}, 4), before);
  store->Clear();
  EXPECT_TRUE(store->Configure(adam).ok());
}

TEST(ConfigureTest, ReplaceChangesWhatSteersTheNextStepAndKeepsRows) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2});
  const auto before = Lookup(*store, {1}, 2);
  TrainConfig config = SgdConfig(0.25f);
  config.weight_bound = 1.5f;
  config.optimizer.weight_decay = 0.5f;
  config.admit_probability = 0.0f;
  ASSERT_TRUE(store->Configure(config, /*replace=*/true).ok());
  EXPECT_EQ(Peek(*store, {1}, 2), before);
  Update(*store, {1}, 2, {4.0f, -40.0f});
  const auto after = Peek(*store, {1}, 2);
  EXPECT_NEAR(after[0], before[0] - 0.25f * (4.0f + 0.5f * before[0]), 1e-6);
  EXPECT_EQ(after[1], 1.5f) << "the new bound";
  Lookup(*store, {2}, 2);
  EXPECT_EQ(store->size(), 1u) << "the new admission";
}

TEST(ConfigureTest, ReplaceRefusesWhatRowsDependOn) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2});
  Lookup(*store, {1}, 2);
  TrainConfig kind = SgdConfig(), initializer = SgdConfig(), momentum = SgdConfig();
  kind.optimizer.kind = OptimizerKind::kAdagrad;
  initializer.initializer.seed = 9;
  momentum.optimizer.momentum = 0.9f;
  for (const auto& [config, field] :
       {std::pair(kind, "optimizer.kind"), std::pair(initializer, "initializer"),
        std::pair(momentum, "optimizer.momentum")}) {
    const Status status = store->Configure(config, /*replace=*/true);
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find(field), std::string::npos) << status.message();
  }
  EXPECT_EQ(store->config(), SgdConfig());
}

}  // namespace
}  // namespace persia::store

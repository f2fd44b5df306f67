// What a store makes of a pool that it finds, and of rules that are not the rows' own.
#include <gtest/gtest.h>

#include <filesystem>

#include "pool/pool_tools.h"
#include "pool/row_pool.h"
#include "store/store_load.h"
#include "store/tier_rules.h"
#include "store/tier_script_test_util.h"
#include "store/tier_test_util.h"

namespace persia::store {
namespace {

using std::chrono::milliseconds;

class TierRecoveryTest : public ::testing::Test {
 protected:
  Status Open() {
    store_.reset();
    auto store = EmbeddingStore::Open(Script::kOptions, directory_.Tier(Script::kCacheRows));
    PERSIA_RETURN_IF_ERROR(store.status());
    store_ = std::move(*store);
    return Status::Ok();
  }
  void TrainAndCommit() {
    ASSERT_TRUE(Open().ok());
    ASSERT_TRUE(store_->Configure(Script::Config()).ok());
    for (uint64_t batch = 1; batch <= 30; ++batch) {
      ASSERT_TRUE(Script::Train(*store_, batch).ok());
    }
    auto batch = store_->tier().RequestCheckpoint();
    ASSERT_TRUE(batch.ok());
    ASSERT_TRUE(store_->tier().WaitCheckpoint(*batch, milliseconds(60'000)).ok());
  }

  uint64_t PoolId() const {
    auto pool = pool::InspectPool(directory_.path());
    EXPECT_TRUE(pool.ok());
    return pool->pool_id;
  }

  PoolDirectory directory_;
  std::unique_ptr<EmbeddingStore> store_;
};

TEST_F(TierRecoveryTest, RulesOfOtherShapesAreRefused) {
  TrainAndCommit();
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                                   OptimizerKind::kRowwiseAdagrad, OptimizerKind::kAdam}) {
    store_.reset();
    TrainConfig config = Script::Config();
    config.optimizer.kind = kind;
    ASSERT_TRUE(SaveRules(directory_.path(), {PoolId(), config}).ok());
    const Status status = Open();
    const bool is_same = kind == OptimizerKind::kAdam;
    EXPECT_EQ(status.code(), is_same ? StatusCode::kOk : StatusCode::kCorruption)
        << status.ToString();
  }
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(30));
}

TEST_F(TierRecoveryTest, RulesOfAnotherPoolAreRefusedWhereThereAreRows) {
  TrainAndCommit();
  TrainConfig others = Script::Config();
  others.optimizer.lr *= 2;  // of the same shapes
  const uint64_t other_id = PoolId() + 1;
  store_.reset();
  ASSERT_TRUE(SaveRules(directory_.path(), {other_id, others}).ok());
  const Status status = Open();
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  for (const uint64_t id : {PoolId(), other_id}) {
    EXPECT_NE(status.message().find(std::to_string(id)), std::string::npos) << status.ToString();
  }
  ASSERT_TRUE(SaveRules(directory_.path(), {PoolId(), Script::Config()}).ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(30));
}

// Whoever removes a pool may leave its rules, of which the next one must not be the victim: neither
// at once nor when a process ends before it is configured.
TEST_F(TierRecoveryTest, RulesOfAPoolThatIsGoneAreNobodys) {
  TrainAndCommit();
  store_.reset();
  std::filesystem::remove(directory_.path() + "/rows.pool");
  for (int start = 0; start < 2; ++start) {
    const Status status = Open();
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(store_->config(), std::nullopt);
  }
  TrainAndCommit();
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(30));
}

// Also where the process ends right after it was.
TEST_F(TierRecoveryTest, RulesAreThoseOfAPoolThatWasCleared) {
  TrainAndCommit();
  const uint64_t id = PoolId();
  store_->Clear();
  EXPECT_EQ(PoolId(), id);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(store_->config(), Script::Config());
  TrainAndCommit();
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(30));
}

// There are no rows, but there are in what a kill would bring back.
TEST_F(TierRecoveryTest, RulesStayWhileACheckpointHasRows) {
  TrainAndCommit();
  auto signs = Range(0, 600);
  signs.push_back(Script::kCounter);
  {
    auto load = StoreLoad::Begin(*store_);
    ASSERT_TRUE(load.ok());
    Changes changes;
    changes.removals.push_back(signs);
    ASSERT_TRUE((*load)->Apply(changes).ok());
  }
  ASSERT_EQ(store_->size(), 0u);
  EXPECT_EQ(store_->Configure(SgdConfig(), /*replace=*/true).code(),
            StatusCode::kFailedPrecondition);
  TrainConfig slower = Script::Config();
  slower.optimizer.lr = 0.01f;
  EXPECT_TRUE(store_->Configure(slower).ok()) << "rows do not depend on it";
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(30));
  store_->Clear();
  EXPECT_TRUE(store_->Configure(SgdConfig()).ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(store_->config(), SgdConfig());
}

// Of more batches than a stamp can tell apart.
TEST_F(TierRecoveryTest, TheOrderOfEvictionIsThatOfAllBatches) {
  constexpr uint64_t kMany = uint64_t{1} << 32;
  const uint64_t versions[] = {5, kMany - 1, kMany + 1, 2 * kMany, 2 * kMany + 9};
  {
    pool::PoolOptions options = directory_.Tier(0).pool;
    options.schema = "embedding rows";
    auto pool = pool::RowPool::Create(directory_.path(), options);
    ASSERT_TRUE(pool.ok());
    uint64_t sign = 0, address = 0;
    for (const uint64_t version : versions) {
      const float values[] = {1, 2};
      const pool::RowWrite write{{++sign, version, 2, 0, 0, 0}, values};
      ASSERT_TRUE((*pool)->Write({&write, 1}, {&address, 1}).ok());
    }
    ASSERT_TRUE((*pool)->BeginCheckpoint(2 * kMany + 10).ok());
    ASSERT_TRUE((*pool)->Commit(2 * kMany + 10).ok());
  }
  ASSERT_TRUE(SaveRules(directory_.path(), {PoolId(), SgdConfig()}).ok());
  auto store = EmbeddingStore::Open({.capacity = 5, .num_internal_shards = 1}, directory_.Tier(5));
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  ASSERT_EQ((*store)->size(), 5u);
  Lookup(**store, {100, 101, 102}, 2);
  for (const uint64_t old : {1, 2, 3}) EXPECT_FALSE(Has(**store, old, 2)) << old;
  for (const uint64_t young : {4, 5}) EXPECT_TRUE(Has(**store, young, 2)) << young;
  Lookup(**store, {103}, 2);
  EXPECT_FALSE(Has(**store, 4, 2));
}

}  // namespace
}  // namespace persia::store

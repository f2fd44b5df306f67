// Stores with a tier beside the same stores in memory, and what becomes of them when they are
// opened again.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "pool/pool_tools.h"
#include "store/cold_rows.h"
#include "store/in_place_rows.h"
#include "store/store_load.h"
#include "store/store_tier.h"
#include "store/tier_fixture_test_util.h"
#include "store/tier_script_test_util.h"
#include "store/tier_test_util.h"

namespace persia::store {
namespace {

TEST_F(TierTest, ServesLikeAStoreInMemory) {
  Create();
  auto model = Script::InMemory();
  for (uint64_t batch = 1; batch <= 200; ++batch) {
    ASSERT_EQ(Lookup(*store_, Script::Signs(batch), Script::kDim),
              Lookup(*model, Script::Signs(batch), Script::kDim));
    ASSERT_TRUE(Script::Train(*model, batch).ok());
    Train(batch, batch);
    ASSERT_LE(store_->tier().stats()->num_hot, Script::kCacheRows * 17 / 16);
    const auto all = Range(0, 600);
    if (batch % 50 == 0) {
      ASSERT_EQ(Peek(*store_, all, Script::kDim), Peek(*model, all, Script::kDim));
      ASSERT_EQ(Script::Rows(*store_), Script::Rows(*model));
    }
  }
  const LookupReport reports[] = {store_->stats().lookups, model->stats().lookups};
  EXPECT_EQ(reports[0].num_missing, reports[1].num_missing);
  EXPECT_EQ(reports[0].num_evicted, reports[1].num_evicted);
  EXPECT_GT(reports[0].num_evicted, 0u);
  EXPECT_GT(store_->tier().stats()->num_promoted, 0u);
  EXPECT_EQ(store_->size(), model->size());
}

TEST_F(TierTest, GoesBackToItsCheckpointAndEvictsInTheSameOrder) {
  Create();
  ScriptModel model;
  for (uint64_t batch = 0; batch < 160; batch += 40) {
    Train(batch + 1, batch + 40);
    Checkpoint();
    Train(batch + 41, batch + 45);  // of which nothing is left
    Open();
    ASSERT_EQ(Script::BatchOf(*store_), batch + 40);
    ASSERT_EQ(Script::Rows(*store_), model.RowsAt(batch + 40));
  }
}

TEST_F(TierTest, ACheckpointIsOfTheMomentItWasAskedFor) {
  Create();
  ScriptModel model;
  std::vector<uint64_t> asked;  // the batch by which each was
  uint64_t last = 0;
  for (uint64_t batch = 1; batch <= 200; ++batch) {
    Train(batch, batch);
    auto checkpoint = store_->tier().RequestCheckpoint();
    if (!checkpoint.ok()) {
      ASSERT_EQ(checkpoint.status().code(), StatusCode::kResourceExhausted);
      continue;
    }
    last = *checkpoint;
    asked.push_back(batch);
  }
  ASSERT_TRUE(IsCommitted(*store_, last));
  Open();
  ASSERT_EQ(Script::BatchOf(*store_), asked.back());
  ASSERT_EQ(Script::Rows(*store_), model.RowsAt(asked.back()));
}

TEST_F(TierTest, AHeldCheckpointWaitsForItsWord) {
  Create();
  ScriptModel model;
  Train(1, 40);
  auto number = store_->tier().RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(number.ok());
  EXPECT_EQ(store_->tier().RequestCheckpoint(/*held=*/true).status().code(),
            StatusCode::kFailedPrecondition);
  auto behind = store_->tier().RequestCheckpoint();
  ASSERT_TRUE(behind.ok());
  Train(41, 45);
  EXPECT_GT(PreparedOf(*store_, *number).num_rows, 0u);
  EXPECT_EQ(store_->tier().stats()->pool.committed, 0u);
  EXPECT_EQ(store_->tier().CommitCheckpoint(*behind).code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store_->tier().CommitCheckpoint(*number).ok());
  ASSERT_TRUE(IsCommitted(*store_, *behind));
  EXPECT_EQ(store_->tier().CommitCheckpoint(*number).code(), StatusCode::kFailedPrecondition);
  Open();
  EXPECT_EQ(Script::Rows(*store_), model.RowsAt(40));
}

TEST_F(TierTest, AHeldCheckpointThatIsDroppedLeavesTheOneBefore) {
  Create();
  ScriptModel model;
  for (const uint64_t batch : {uint64_t{0}, uint64_t{40}}) {
    Train(batch + 1, batch + 10);
    Checkpoint();
    Train(batch + 11, batch + 20);
    auto number = store_->tier().RequestCheckpoint(/*held=*/true);
    ASSERT_TRUE(number.ok());
    PreparedOf(*store_, *number);
    Train(batch + 21, batch + 30);
    ASSERT_TRUE(store_->tier().DropCheckpoint(*number).ok());
    EXPECT_EQ(store_->tier().DropCheckpoint(*number).code(), StatusCode::kFailedPrecondition);
    Train(batch + 31, batch + 40);
  }
  Checkpoint();  // the rows that it counts are those since the last one that was not dropped
  Train(81, 85);
  Open();
  EXPECT_EQ(Script::Rows(*store_), model.RowsAt(80));
}

TEST_F(TierTest, AHeldCheckpointIsCommittedAfterItsStoreHasGone) {
  Create();
  ScriptModel model;
  Train(1, 20);
  Checkpoint();
  Train(21, 40);
  auto number = store_->tier().RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(number.ok());
  const pool::PreparedCheckpoint prepared = PreparedOf(*store_, *number);
  Train(41, 60);
  EXPECT_EQ(pool::CommitPool(directory_.path(), prepared).code(), StatusCode::kUnavailable);
  store_.reset();
  ASSERT_TRUE(pool::CommitPool(directory_.path(), prepared).ok());
  EXPECT_EQ(pool::CommitPool(directory_.path(), prepared).code(), StatusCode::kFailedPrecondition);
  Open();
  EXPECT_EQ(Script::Rows(*store_), model.RowsAt(40));
  // Opening undoes what was not committed: that cannot be made up for.
  Train(41, 50);
  number = store_->tier().RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(number.ok());
  const pool::PreparedCheckpoint lost = PreparedOf(*store_, *number);
  Open();
  EXPECT_EQ(Script::Rows(*store_), model.RowsAt(40));
  store_.reset();
  EXPECT_EQ(pool::CommitPool(directory_.path(), lost).code(), StatusCode::kFailedPrecondition);
}

TEST_F(TierTest, ClearingEndsAHeldCheckpoint) {
  Create();
  Train(1, 20);
  auto number = store_->tier().RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(number.ok());
  PreparedOf(*store_, *number);
  store_->Clear();
  EXPECT_EQ(store_->tier().PreparedCheckpoint(*number).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->tier().CommitCheckpoint(*number).code(), StatusCode::kFailedPrecondition);
  Train(1, 20);
  Checkpoint();
  Open();
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(20));
}

// What the store's thread meets when others commit or clear what it has just seen pending.
TEST_F(TierTest, ACheckpointThatEndsMeanwhileIsNoFailure) {
  Create();
  StoreTier& tier = store_->tier();
  auto committed = tier.RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(committed.ok());
  PreparedOf(*store_, *committed);
  ASSERT_TRUE(tier.CommitCheckpoint(*committed).ok());
  EXPECT_TRUE(tier.EndCheckpoint(*committed).ok());

  auto cleared = tier.RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(cleared.ok());
  PreparedOf(*store_, *cleared);
  ASSERT_TRUE(tier.pool().Clear().ok());  // the first half of StoreTier::Clear()
  EXPECT_TRUE(tier.EndCheckpoint(*cleared).ok());
  EXPECT_TRUE(tier.status().ok());
}

// Calls that wait while a checkpoint is taken are not of it, and removals are changes, too.
TEST_F(TierTest, WhetherAnythingChangedSinceACheckpointIsKnown) {
  Open();
  TrainConfig config = Script::Config();
  config.min_norm = 1e9f;
  ASSERT_TRUE(store_->Configure(config).ok());
  Train(1, 5);
  Checkpoint();
  EXPECT_EQ(store_->tier().stats()->batch, store_->tier().stats()->pool.committed + 1);
  auto num_removed = store_->RemoveSmallRows();
  ASSERT_TRUE(num_removed.ok());
  EXPECT_GT(*num_removed, 0u);
  EXPECT_GT(store_->tier().stats()->batch, store_->tier().stats()->pool.committed + 1);
}

TEST_F(TierTest, WithoutACheckpointNothingIsLeft) {
  Create();
  Train(1, 20);
  Open();
  EXPECT_EQ(store_->size(), 0u);
  EXPECT_EQ(store_->config(), Script::Config());
}

TEST_F(TierTest, TheRulesComeBackAndAScriptMayChangeWhatRowsDoNotDependOn) {
  Create();
  Train(1, 20);
  Checkpoint();
  Open();
  EXPECT_EQ(store_->config(), Script::Config());
  TrainConfig other = Script::Config();
  other.optimizer.kind = OptimizerKind::kSgd;
  EXPECT_EQ(store_->Configure(other).code(), StatusCode::kFailedPrecondition);
  TrainConfig slower = Script::Config();
  slower.optimizer.lr = 0.01f;
  EXPECT_TRUE(store_->Configure(slower).ok());
  EXPECT_EQ(store_->Configure(Script::Config()).code(), StatusCode::kFailedPrecondition)
      << "only once";
}

TEST_F(TierTest, ClearedItIsEmptyForGood) {
  Create();
  Train(1, 30);
  Checkpoint();
  store_->Clear();
  EXPECT_EQ(store_->size(), 0u);
  EXPECT_EQ(store_->tier().stats()->pool.used_bytes, 0u);
  Train(1, 10);
  Open();
  EXPECT_EQ(store_->size(), 0u);
  ASSERT_TRUE(store_->Configure(Script::Config()).ok());
  Train(1, 10);
  Checkpoint();
  Open();
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(10));
}

TEST_F(TierTest, LoadedRowsAreOfTheNextCheckpoint) {
  Create();
  Train(1, 30);
  Checkpoint();
  const auto signs = Range(0, 200);
  std::vector<float> rows(signs.size() * 2);
  std::iota(rows.begin(), rows.end(), 1.0f);
  const std::vector<uint32_t> ages(signs.size(), 0);
  {
    auto load = StoreLoad::Begin(*store_);
    ASSERT_TRUE(load.ok());
    ASSERT_TRUE((*load)->Replace(SgdConfig()).ok());
    ASSERT_TRUE(
        (*load)->Add({.dim = 2, .signs = signs, .ages = ages, .embeddings = rows.data()}).ok());
    (*load)->Finish();
  }
  EXPECT_EQ(Peek(*store_, signs, 2), rows);
  EXPECT_LE(store_->tier().stats()->num_hot, Script::kCacheRows * 17 / 16);
  Checkpoint();
  Open();
  EXPECT_EQ(store_->config(), SgdConfig());
  EXPECT_EQ(Peek(*store_, signs, 2), rows);
}

TEST_F(TierTest, EvictionsLeaveNothingBehind) {
  Create();
  Train(1, 1);
  for (uint64_t first = 1000; first < 1000 + 100 * 400; first += 100) {
    Lookup(*store_, Range(first, first + 100), Script::kDim);
    if (first % 2000 == 0) static_cast<void>(store_->tier().RequestCheckpoint());
  }
  Checkpoint();
  const TierStats stats = *store_->tier().stats();
  EXPECT_EQ(stats.num_rows, Script::kOptions.capacity);
  EXPECT_LE(stats.pool.used_bytes, stats.num_rows * pool::CellBytes(3 * Script::kDim));
}

TEST_F(TierTest, AFullPoolIsAnErrorAndTheCheckpointStays) {
  Create();
  Train(1, 30);
  Checkpoint();
  store_.reset();
  TierOptions small = directory_.Tier(Script::kCacheRows);
  auto store = EmbeddingStore::Open({.capacity = 10'000'000, .num_internal_shards = 3}, small);
  ASSERT_TRUE(store.ok());
  Status status;
  const auto signs = Range(0, 200);
  std::vector<float> rows(signs.size() * kMaxDim / 8);
  for (uint64_t first = 1000; status.ok(); first += 200) {
    ASSERT_LT(first, 1'000'000u);
    const auto more = Range(first, first + 200);
    const RowBlock block = {.dim = kMaxDim / 16, .signs = more};
    status = (*store)->Lookup({&block, 1}, LookupMode::kTrain, rows.data());
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.ToString();
  store->reset();
  Open();
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(30));
}

// What a shard without rows forgets, a snapshot does not miss.
TEST_F(TierTest, RulesMayChangeWhileASnapshotIsReadAndAShardIsEmpty) {
  Create();
  std::vector<uint64_t> signs;
  for (uint64_t sign = 0; signs.size() < 60; ++sign) {
    if (ShardOfKey(SignKey(sign), Script::kOptions.num_internal_shards) == 1) signs.push_back(sign);
  }
  Lookup(*store_, signs, Script::kDim);
  const auto expected = Script::Rows(*store_);
  auto snapshot = StoreSnapshot::Begin(*store_, {});
  ASSERT_TRUE(snapshot.ok());
  TrainConfig slower = Script::Config();
  slower.optimizer.lr = 0.01f;
  ASSERT_TRUE(store_->Configure(slower, /*replace=*/true).ok());
  EXPECT_EQ(Script::Rows(**snapshot), expected);
  EXPECT_EQ(expected.size(), 60u);
}

// While a shard is kept from other calls, some rows are read from the pool and no more.
TEST_F(TierTest, StepsOfASnapshotReadFewRowsFromThePool) {
  Create();
  ASSERT_TRUE(store_->TrackChanges(1000).ok());
  for (uint64_t first = 0; first < 200; first += 20) {
    Lookup(*store_, Range(first, first + 20), Script::kDim);
  }
  for (const bool takes_changes : {false, true}) {
    auto snapshot =
        takes_changes ? StoreSnapshot::TakeChanges(*store_, {}) : StoreSnapshot::Begin(*store_, {});
    ASSERT_TRUE(snapshot.ok());
    StatusOr<bool> has_more = true;
    uint64_t num_rows = 0;
    for (uint32_t shard = 0; shard < 3; ++shard) {
      for (has_more = true; *has_more;) {
        StoreSnapshot::Batch batch;
        has_more = (*snapshot)->Read(shard, 10'000, &batch);
        ASSERT_TRUE(has_more.ok()) << has_more.status().ToString();
        EXPECT_LE(batch.read.num_rows(), kColdRowsAtATime + Script::kCacheRows / 2);
        num_rows += batch.read.num_rows();
      }
    }
    EXPECT_EQ(num_rows, store_->size());
  }
}

// A pass over the index for each block would make the time that loading takes that of the square.
TEST_F(TierTest, LoadingDoesNotLookForTheColdestRowsWithEachBlock) {
  Create();
  auto load = StoreLoad::Begin(*store_);
  ASSERT_TRUE(load.ok());
  const std::vector<float> rows(20 * Script::kDim, 1.0f);
  for (uint64_t first = 0; first < 220; first += 20) {
    const auto signs = Range(first, first + 20);
    const std::vector<uint32_t> ages(signs.size(), static_cast<uint32_t>(220 - first));
    ASSERT_TRUE(
        (*load)
            ->Add({.dim = Script::kDim, .signs = signs, .ages = ages, .embeddings = rows.data()})
            .ok());
    EXPECT_LE(store_->tier().stats()->num_hot, Script::kCacheRows * 17 / 16);
  }
  (*load)->Finish();
  EXPECT_LE(store_->tier().stats()->num_passes, 3u);
  EXPECT_EQ(store_->size(), 220u);
  EXPECT_EQ(Peek(*store_, Range(0, 20), Script::kDim), rows);
}

TEST_F(TierTest, SaysWhyItCannotBeOpened) {
  EXPECT_EQ(StatusOfOpen(directory_.Tier(2)).code(), StatusCode::kInvalidArgument);
  TierOptions both = directory_.Tier(Script::kCacheRows);
  both.cache_bytes = 1 << 20;
  EXPECT_EQ(StatusOfOpen(both).code(), StatusCode::kInvalidArgument);
  both.cache_rows = 0;
  both.cache_bytes = 3 << 10;
  EXPECT_TRUE(StatusOfOpen(both).ok());
  both.cache_bytes -= 1;
  EXPECT_EQ(StatusOfOpen(both).code(), StatusCode::kInvalidArgument);
  TierOptions nowhere = directory_.Tier(Script::kCacheRows);
  nowhere.directory += "/missing";
  EXPECT_EQ(StatusOfOpen(nowhere).code(), StatusCode::kNotFound);
  Create();
  EXPECT_EQ(
      EmbeddingStore::Open(Script::kOptions, directory_.Tier(Script::kCacheRows)).status().code(),
      StatusCode::kUnavailable);
  Train(1, 5);
  Checkpoint();
  store_.reset();
  const std::string rules = directory_.path() + "/rules";
  std::ofstream(rules, std::ios::app) << "x";
  EXPECT_EQ(StatusOfOpen(directory_.Tier(Script::kCacheRows)).code(), StatusCode::kCorruption);
  std::filesystem::remove(rules);
  EXPECT_EQ(StatusOfOpen(directory_.Tier(Script::kCacheRows)).code(), StatusCode::kCorruption);
}

TEST_F(TierTest, RefusesWhatItCannotDo) {
  Create();
  EXPECT_EQ(InPlaceRows::Begin(*store_, LookupMode::kTrain).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(Script::InMemory()->tier().RequestCheckpoint().status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Script::InMemory()->tier().stats().has_value());
}

}  // namespace
}  // namespace persia::store

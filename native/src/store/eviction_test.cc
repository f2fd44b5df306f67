// Eviction other than by the store's capacity: by time to live, by norm.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "store/in_place_rows.h"
#include "store/store_load.h"
#include "store/store_snapshot.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

using std::chrono::milliseconds;
constexpr uint32_t kDim = 4;
constexpr EmbeddingStore::Options kTwoShards = {.capacity = 1000, .num_internal_shards = 2};

void SleepAWhile() { std::this_thread::sleep_for(milliseconds(20)); }
std::chrono::steady_clock::time_point InAMinute() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

TEST(TimeToLiveTest, RowsThatNoTrainingBatchUsesGo) {
  TrainConfig config = SgdConfig();
  config.time_to_live_sec = 2.0f;  // longer than a busy machine keeps this thread waiting
  auto store = MakeStore(kTwoShards, config);
  const auto used = Range(0, 50);
  Lookup(*store, Range(0, 100), kDim);
  for (const auto end = InAMinute();
       store->size() > 50 && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(milliseconds(100));
    Lookup(*store, used, kDim);
    Peek(*store, Range(50, 100), kDim);  // evaluation keeps nothing
  }
  EXPECT_EQ(store->size(), 50u);
  for (const uint64_t sign : used) EXPECT_TRUE(Has(*store, sign));
  const StoreStats stats = store->stats();
  EXPECT_EQ(stats.lookups.num_expired, 50u);
  EXPECT_EQ(stats.lookups.num_evicted, 0u);
  // Their gradients are skipped and counted; their IDs begin anew.
  EXPECT_EQ(Update(*store, {60}, kDim, std::vector<float>(kDim, 1.0f)).num_missing, 1u);
}

TEST(TimeToLiveTest, CanBeChangedWhileThereAreRows) {
  auto store = MakeStore(kTwoShards);
  Lookup(*store, Range(0, 10), kDim);
  TrainConfig config = SgdConfig();
  config.time_to_live_sec = 0.05f;
  EXPECT_EQ(store->Configure(config).code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store->Configure(config, /*replace=*/true).ok());
  const auto lives_on = Range(100, 110);
  for (int i = 0; i < 12; ++i) {
    Lookup(*store, lives_on, kDim);
    SleepAWhile();
  }
  EXPECT_EQ(store->size(), 10u);
  ASSERT_TRUE(store->Configure(SgdConfig(), /*replace=*/true).ok());
  for (int i = 0; i < 12; ++i) {
    Lookup(*store, {200}, kDim);
    SleepAWhile();
  }
  EXPECT_EQ(store->size(), 11u);
}

TEST(TimeToLiveTest, HoldsForRowsUsedInPlaceAndGoesBetweenLookupAndUpdate) {
  TrainConfig config = SgdConfig();
  config.time_to_live_sec = 1.0f;  // the rows must be there for longer than this thread waits
  auto store = MakeStore(kTwoShards, config);
  const auto signs = Range(0, 20);
  Lookup(*store, signs, kDim);
  std::vector<RowHandle> handles(signs.size());
  std::vector<const float*> values(signs.size());
  const SignRows rows{.dim = kDim, .signs = signs, .handles = handles, .values = values};
  std::vector<uint64_t> removals;
  const std::vector<float> zeros(kDim, 0.0f);
  {
    auto begun = InPlaceRows::Begin(*store, LookupMode::kTrain);
    ASSERT_TRUE(begun.ok());
    std::vector<uint32_t> missing;
    begun->Find(rows, zeros.data(), &missing);
    ASSERT_TRUE(missing.empty());
    removals = begun->Removals();
  }
  for (const auto end = InAMinute(); store->size() > 0 && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(milliseconds(100));
    ASSERT_TRUE(InPlaceRows::Begin(*store, LookupMode::kTrain).ok());
  }
  EXPECT_EQ(store->size(), 0u);
  auto update = InPlaceRows::BeginUpdate(*store, removals);
  update.Locate(rows);
  const std::vector<float> gradient(kDim, 1.0f);
  const std::vector<const float*> gradients(signs.size(), gradient.data());
  UpdateReport report;
  update.Update(rows, gradients, &report);
  EXPECT_EQ(report.num_missing, signs.size());
}

TEST(TimeToLiveTest, ASnapshotHasTheRowsThatGoWhileItIsRead) {
  TrainConfig config = SgdConfig();
  config.time_to_live_sec = 0.05f;
  auto store = MakeStore(kTwoShards, config);
  Lookup(*store, Range(0, 200), kDim);
  auto snapshot = StoreSnapshot::Begin(*store, {});
  ASSERT_TRUE(snapshot.ok());
  for (int i = 0; i < 12; ++i) {
    SleepAWhile();
    Lookup(*store, {1000, 1001, 1002, 1003}, kDim);
  }
  EXPECT_LE(store->size(), 4u);
  size_t num_rows = 0;
  StoreSnapshot::Batch batch;
  for (uint32_t shard = 0; shard < (*snapshot)->num_shards(); ++shard) {
    for (bool has_more = true; has_more;) {
      has_more = (*snapshot)->Read(shard, 16, &batch).value();
      num_rows += batch.read.num_rows();
      for (const RowRecords& saved : batch.saved) num_rows += saved.num_rows();
    }
  }
  EXPECT_EQ(num_rows, 200u);
}

TEST(SmallRowsTest, RowsBelowTheirGroupsNormGo) {
  TrainConfig config = SgdConfig();
  config.feature_index_prefix_bit = 8;
  RowConfig rows = config;
  rows.min_norm = 0.5f;
  config.groups = {{1, rows}};
  auto store = MakeStore(kTwoShards, config);
  std::vector<uint64_t> signs;
  std::vector<float> values;
  for (const uint64_t group : {1, 2}) {
    for (uint64_t id = 0; id < 100; ++id) {
      signs.push_back((group << 56) + id);
      // The norm is twice the element.
      values.insert(values.end(), kDim, 0.0025f * static_cast<float>(id));
    }
  }
  values[100 * kDim / 2] = -0.6f;  // row 50, whose norm is in one element
  ASSERT_TRUE(SetRows(*store, signs, kDim, values).ok());
  StatusOr<uint64_t> removed = store->RemoveSmallRows();
  ASSERT_TRUE(removed.ok());
  EXPECT_EQ(*removed, 99u);
  for (uint64_t id = 0; id < 100; ++id) {
    EXPECT_EQ(Has(*store, (uint64_t{1} << 56) + id), id == 50) << id;
    EXPECT_TRUE(Has(*store, (uint64_t{2} << 56) + id));
  }
  EXPECT_EQ(store->stats().lookups.num_small, 99u);
}

TEST(SmallRowsTest, WaitsForNoSnapshotAndNeedsAMinNorm) {
  auto store = MakeStore(kTwoShards);
  ASSERT_TRUE(SetRows(*store, Range(0, 10), kDim, std::vector<float>(10 * kDim, 0.0f)).ok());
  EXPECT_EQ(store->RemoveSmallRows().value(), 0u);
  TrainConfig config = SgdConfig();
  config.min_norm = 1e-3f;
  ASSERT_TRUE(store->Configure(config, /*replace=*/true).ok());
  {
    const auto snapshot = StoreSnapshot::Begin(*store, {});
    EXPECT_EQ(store->RemoveSmallRows().status().code(), StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(store->RemoveSmallRows().value(), 10u);
  EXPECT_EQ(store->size(), 0u);
}

constexpr uint64_t kLimited = uint64_t{1} << 56;
constexpr uint64_t kOther = uint64_t{2} << 56;

TrainConfig LimitConfig(uint64_t capacity) {
  TrainConfig config = SgdConfig();
  config.feature_index_prefix_bit = 8;
  RowConfig rows = config;
  rows.capacity = capacity;
  config.groups = {{1, rows}};
  return config;
}

uint64_t CountRows(EmbeddingStore& store, uint64_t begin, uint64_t end) {
  uint64_t count = 0;
  for (uint64_t sign = begin; sign < end; ++sign) count += Has(store, sign) ? 1 : 0;
  return count;
}

constexpr EmbeddingStore::Options kOneShard = {.capacity = 1000, .num_internal_shards = 1};

TEST(GroupCapacityTest, TheGroupsOldestRowsGoAndNoOthers) {
  auto store = MakeStore(kOneShard, LimitConfig(100));
  Lookup(*store, Range(kOther, kOther + 300), kDim);
  for (uint64_t first = 0; first < 200; first += 10) {
    Lookup(*store, Range(kLimited + first, kLimited + first + 10), kDim);
    Lookup(*store, Range(kLimited, kLimited + 10), kDim);  // always in use
    const uint64_t expected = std::min<uint64_t>(first + 10, 100);
    ASSERT_EQ(CountRows(*store, kLimited, kLimited + 200), expected);
  }
  EXPECT_EQ(CountRows(*store, kLimited, kLimited + 10), 10u);
  EXPECT_EQ(CountRows(*store, kLimited + 110, kLimited + 200), 90u);
  EXPECT_EQ(CountRows(*store, kOther, kOther + 300), 300u) << "older than all that went";
  EXPECT_EQ(store->stats().lookups.num_evicted, 100u);
}

TEST(GroupCapacityTest, AFullStoreGivesUpOneRowForEachNewOne) {
  auto store = MakeStore(kOneShard, LimitConfig(100));
  Lookup(*store, Range(kLimited, kLimited + 100), kDim);
  Lookup(*store, Range(kOther, kOther + 900), kDim);
  EXPECT_EQ(store->size(), 1000u);
  Lookup(*store, Range(kLimited + 100, kLimited + 150), kDim);
  EXPECT_EQ(store->size(), 1000u);
  EXPECT_EQ(CountRows(*store, kOther, kOther + 900), 900u);
}

TEST(GroupCapacityTest, ABatchLargerThanTheCapacityKeepsAsManyRows) {
  auto store = MakeStore(kOneShard, LimitConfig(100));
  LookupReport report;
  Lookup(*store, Range(kLimited, kLimited + 250), kDim, LookupMode::kTrain, &report);
  EXPECT_EQ(report.num_evicted, 150u);
  EXPECT_EQ(store->size(), 100u);
}

TEST(GroupCapacityTest, IsDividedAmongShardsAndMayChange) {
  constexpr EmbeddingStore::Options kFour = {.capacity = 1000, .num_internal_shards = 4};
  auto store = MakeStore(kFour, LimitConfig(102));
  Lookup(*store, Range(kLimited, kLimited + 900), kDim);
  EXPECT_EQ(store->size(), 102u);
  ASSERT_TRUE(store->Configure(LimitConfig(300), /*replace=*/true).ok());
  Lookup(*store, Range(kLimited, kLimited + 900), kDim);
  EXPECT_EQ(store->size(), 300u);
  // Lower again: with the next new row.
  ASSERT_TRUE(store->Configure(LimitConfig(40), /*replace=*/true).ok());
  Lookup(*store, Range(kLimited + 1000, kLimited + 1100), kDim);
  EXPECT_EQ(store->size(), 40u);
  store->Clear();
  Lookup(*store, Range(kLimited, kLimited + 900), kDim);
  EXPECT_EQ(store->size(), 40u);
  const Status status = store->Configure(LimitConfig(3), /*replace=*/true);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("capacity is 3"), std::string::npos);
}

TEST(GroupCapacityTest, OfALoadIsRefusedWhileTheRowsAreThere) {
  constexpr EmbeddingStore::Options kFour = {.capacity = 1000, .num_internal_shards = 4};
  auto store = MakeStore(kFour, LimitConfig(100));
  Lookup(*store, Range(kOther, kOther + 50), kDim);
  const auto load = StoreLoad::Begin(*store).value();
  EXPECT_EQ(load->Check(LimitConfig(3)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(load->Replace(LimitConfig(3)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CountRows(*store, kOther, kOther + 50), 50u);
  EXPECT_EQ(store->config(), LimitConfig(100));
  EXPECT_TRUE(load->Check(LimitConfig(4)).ok());
  EXPECT_EQ(store->size(), 50u) << "a check changes nothing";
  EXPECT_TRUE(load->Replace(LimitConfig(4)).ok());
  EXPECT_EQ(store->size(), 0u);
}

TEST(GroupCapacityTest, HoldsInPlaceWhereTooLargeABatchIsRefused) {
  auto store = MakeStore(kOneShard, LimitConfig(100));
  const auto insert = [&](uint64_t begin, uint64_t end) {
    const auto signs = Range(begin, end);
    std::vector<RowHandle> handles(signs.size());
    std::vector<const float*> values(signs.size());
    const SignRows rows{.dim = kDim, .signs = signs, .handles = handles, .values = values};
    const std::vector<float> zeros(kDim, 0.0f);
    auto in_place = InPlaceRows::Begin(*store, LookupMode::kTrain);
    std::vector<uint32_t> numbers;
    in_place->Find(rows, zeros.data(), &numbers);
    std::vector<MissingRow> missing;
    for (const uint32_t number : numbers) missing.push_back({&rows, number});
    LookupReport report;
    return in_place->Insert(0, missing, &report);
  };
  EXPECT_TRUE(insert(kLimited, kLimited + 100).ok());
  EXPECT_TRUE(insert(kLimited + 50, kLimited + 150).ok());
  EXPECT_EQ(CountRows(*store, kLimited + 50, kLimited + 150), 100u);
  const Status status = insert(kLimited + 1000, kLimited + 1101);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(CountRows(*store, kLimited + 50, kLimited + 150), 100u) << "none went for it";
}

// For ThreadSanitizer as much as for the counts.
TEST(EvictionTest, AllKindsAtOnceLoseCountOfNoRow) {
  TrainConfig config = LimitConfig(60);
  config.time_to_live_sec = 0.002f;
  config.groups[0].rows.min_norm = 1e-3f;
  constexpr EmbeddingStore::Options kSmall = {.capacity = 400, .num_internal_shards = 2};
  auto store = MakeStore(kSmall, config);
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&store, thread] {
      for (uint64_t step = 0; step < 300; ++step) {
        for (const uint64_t group : {kLimited, kOther}) {
          const auto signs =
              Range(group + step * 7 + thread * 50, group + step * 7 + thread * 50 + 40);
          Lookup(*store, signs, kDim);
          Update(*store, signs, kDim, std::vector<float>(signs.size() * kDim, 1e-4f));
        }
      }
    });
  }
  threads.emplace_back([&store] {
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(store->RemoveSmallRows().ok());
  });
  for (std::thread& thread : threads) thread.join();
  // However fast that was, now rows are older than their time to live.
  for (uint64_t sign = 1; store->stats().lookups.num_expired == 0 && sign < 5000; ++sign) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Lookup(*store, {sign}, kDim);
  }
  const StoreStats stats = store->stats();
  const LookupReport& counts = stats.lookups;
  EXPECT_EQ(counts.num_inserted,
            stats.num_rows + counts.num_evicted + counts.num_expired + counts.num_small);
  EXPECT_GT(counts.num_evicted, 0u);
  EXPECT_GT(counts.num_expired, 0u);
  EXPECT_LE(stats.num_rows, 400u);
}

}  // namespace
}  // namespace persia::store

#include "store/change_set.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "store/sign_index.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

TEST(ChangeSet, HasEachKeyOnce) {
  ChangeSet changes(1000);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t sign = 0; sign < 500; ++sign) changes.Add(SignKey(sign));  // SignKey(0) is 0
  }
  EXPECT_EQ(changes.size(), 500u);
  EXPECT_FALSE(changes.has_overflowed());
  for (uint64_t sign = 0; sign < 1000; ++sign) {
    EXPECT_EQ(changes.Contains(SignKey(sign)), sign < 500) << sign;
  }
  std::set<uint64_t> signs;
  const auto by_shard = changes.KeysByShard(7);
  for (uint32_t shard = 0; shard < 7; ++shard) {
    EXPECT_TRUE(std::is_sorted(by_shard[shard].begin(), by_shard[shard].end()));
    for (const uint64_t key : by_shard[shard]) {
      EXPECT_EQ(ShardOfKey(key, 7), shard);
      EXPECT_TRUE(signs.insert(SignOfKey(key)).second);
    }
  }
  EXPECT_EQ(signs.size(), 500u);
}

TEST(ChangeSet, SaysThatItHasOverflowed) {
  ChangeSet changes(100);
  for (uint64_t sign = 0; sign < 100; ++sign) changes.Add(SignKey(sign));
  EXPECT_FALSE(changes.has_overflowed());
  changes.Add(SignKey(7));
  EXPECT_FALSE(changes.has_overflowed());
  changes.Add(SignKey(100));
  EXPECT_TRUE(changes.has_overflowed());
}

// Keys that all have the same home: an attack, not chance.
TEST(ChangeSet, OverflowsRatherThanSearchForEver) {
  ChangeSet changes(100'000);
  for (uint64_t key = 1; key < 5000; ++key) changes.Add(key);
  EXPECT_TRUE(changes.has_overflowed());
}

TEST(ChangeSet, IsFilledByManyThreads) {
  ChangeSet changes(100'000);
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      ChangeBatch batch(&changes);
      for (uint64_t i = 0; i < 40'000; ++i) batch.Add(SignKey(i + thread * 10'000));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(changes.size(), 70'000u);
  EXPECT_FALSE(changes.has_overflowed());
  for (uint64_t i = 0; i < 70'000; ++i) ASSERT_TRUE(changes.Contains(SignKey(i)));
}

TEST(ChangeSet, TakesWhatAnotherHas) {
  ChangeSet changes(1000), other(1000);
  changes.Add(SignKey(1));
  other.Add(SignKey(0));
  other.Add(SignKey(2));
  other.NoteClear();
  changes.AddAll(other);
  EXPECT_EQ(changes.size(), 3u);
  EXPECT_TRUE(changes.was_cleared());
}

TEST(TrackChanges, SaysHowManyThereAre) {
  const auto store = MakeStore({.capacity = 1000, .num_internal_shards = 3});
  Lookup(*store, Range(0, 50), 4);
  EXPECT_EQ(store->change_status().max_rows, 0u);
  const uint64_t memory_bytes = store->stats().memory_bytes;
  ASSERT_TRUE(store->TrackChanges(100).ok());
  EXPECT_GT(store->stats().memory_bytes, memory_bytes);
  Lookup(*store, Range(0, 50), 4);  // uses rows, changes none
  EXPECT_EQ(store->change_status().num_rows, 0u);
  Update(*store, Range(40, 60), 4, std::vector<float>(80, 1.0f));  // ten have no row
  EXPECT_EQ(store->change_status().num_rows, 10u);
  EXPECT_FALSE(store->change_status().is_due);
  Lookup(*store, Range(100, 140), 4);
  EXPECT_EQ(store->change_status().num_rows, 50u);
  EXPECT_TRUE(store->change_status().is_due);
  ASSERT_TRUE(SetRows(*store, Range(100, 200), 4, std::vector<float>(400, 1.0f)).ok());
  EXPECT_TRUE(store->change_status().has_overflowed);
  ASSERT_TRUE(store->TrackChanges(100).ok());
  EXPECT_FALSE(store->change_status().has_overflowed);
  ASSERT_TRUE(store->TrackChanges(0).ok());
  EXPECT_EQ(store->stats().memory_bytes > memory_bytes + 100'000, false);
  EXPECT_EQ(store->TrackChanges(ChangeSet::kMaxKeys + 1).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace persia::store

// Rows that are brought into memory before their lookup.
#include <gtest/gtest.h>

#include <thread>

#include "store/store_test_util.h"
#include "store/store_tier.h"
#include "store/tier_test_util.h"

namespace persia::store {
namespace {

TEST(ReadAheadTest, GivesWhatHasRoomInTurn) {
  ReadAhead ahead(5);
  ahead.Add(Range(0, 3));
  ahead.Add(Range(10, 20));
  ahead.Add(Range(30, 31));
  EXPECT_EQ(ahead.num_dropped(), 9u);
  std::vector<uint64_t> signs;
  ASSERT_TRUE(ahead.Take(&signs));
  EXPECT_EQ(signs, Range(0, 3));
  ASSERT_TRUE(ahead.Take(&signs));
  EXPECT_EQ(signs, Range(10, 12));
  std::thread taker([&] { EXPECT_FALSE(ahead.Take(&signs)); });
  ahead.Stop();
  taker.join();
}

constexpr uint64_t kCacheRows = 100;

class PrefetchTest : public ::testing::TestWithParam<pool::PoolKind> {
 protected:
  void SetUp() override {
    auto store = EmbeddingStore::Open({.capacity = 1000, .num_internal_shards = 1},
                                      directory_.Tier(kCacheRows, GetParam()));
    if (store.status().code() == StatusCode::kFailedPrecondition) GTEST_SKIP() << "no libpmem";
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    ASSERT_TRUE(store_->Configure(SgdConfig()).ok());
    for (uint64_t first = 0; first < 400; first += 50) {
      Lookup(*store_, Range(first, first + 50), 4);
    }
    AwaitShrinking();
  }
  void AwaitShrinking() {
    ASSERT_TRUE(Eventually([&] { return store_->tier().stats()->num_hot <= kCacheRows; }));
  }
  void Prefetch(const std::vector<uint64_t>& signs) {
    const uint64_t before = store_->tier().stats()->num_prefetched;
    store_->tier().Prefetch(signs);
    ASSERT_TRUE(Eventually(
        [&] { return store_->tier().stats()->num_prefetched == before + signs.size(); }));
  }

  PoolDirectory directory_;
  std::unique_ptr<EmbeddingStore> store_;
};

TEST_P(PrefetchTest, TheLookupFindsTheRowsInMemory) {
  const auto signs = Range(0, 30);
  const auto expected = Peek(*store_, signs, 4);
  Prefetch(signs);
  const TierStats before = *store_->tier().stats();
  EXPECT_EQ(Lookup(*store_, signs, 4), expected);
  const TierStats after = *store_->tier().stats();
  EXPECT_EQ(after.num_hits, before.num_hits + 30);
  EXPECT_EQ(after.num_misses, before.num_misses);
  Lookup(*store_, Range(30, 60), 4);
  EXPECT_EQ(store_->tier().stats()->num_misses, before.num_misses + 30);
}

// They were used the longest ago, and would be the first to leave again.
TEST_P(PrefetchTest, TheRowsStayUntilTheirLookup) {
  for (uint64_t first = 0; first < 300; first += 20) {
    Prefetch(Range(first, first + 20));
    AwaitShrinking();
    const uint64_t misses = store_->tier().stats()->num_misses;
    Lookup(*store_, Range(first, first + 20), 4);
    ASSERT_EQ(store_->tier().stats()->num_misses, misses) << first;
  }
}

TEST_P(PrefetchTest, IsBoundedAndChangesNothing) {
  auto model = EmbeddingStore::Create({.capacity = 1000, .num_internal_shards = 1});
  ASSERT_TRUE((*model)->Configure(SgdConfig()).ok());
  for (uint64_t first = 0; first < 400; first += 50) Lookup(**model, Range(first, first + 50), 4);
  store_->tier().Prefetch(Range(0, 10'000));
  EXPECT_EQ(store_->tier().stats()->num_unheeded, 10'000 - kCacheRows / 2);
  ASSERT_TRUE(Eventually([&] { return store_->tier().stats()->num_prefetched > 0; }));
  // No rows are made; which ones are evicted is as without.
  EXPECT_EQ(store_->size(), 400u);
  for (const auto& store : {store_.get(), model->get()}) {
    Lookup(*store, Range(2000, 2900), 4);
  }
  for (uint64_t sign = 0; sign < 400; ++sign) {
    ASSERT_EQ(Has(*store_, sign), Has(**model, sign)) << sign;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, PrefetchTest,
                         ::testing::Values(pool::PoolKind::kFile, pool::PoolKind::kPmem),
                         [](const auto& kind) {
                           return kind.param == pool::PoolKind::kFile ? "file" : "pmem";
                         });

}  // namespace
}  // namespace persia::store

// What a store with a tier has in memory, where its cache is given in bytes.
#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "store/tier_script_test_util.h"
#include "store/tier_test_util.h"

namespace persia::store {
namespace {

constexpr EmbeddingStore::Options kOptions = {.capacity = 1'000'000, .num_internal_shards = 4};

class TierMemoryTest : public ::testing::Test {
 protected:
  void Open(uint64_t cache_bytes) {
    TierOptions tier = directory_.Tier(0);
    tier.pool.size_bytes = uint64_t{1} << 30;
    tier.cache_bytes = cache_bytes;
    auto store = EmbeddingStore::Open(kOptions, tier);
    auto model = EmbeddingStore::Create(kOptions);
    ASSERT_TRUE(store.ok() && model.ok()) << store.status().ToString();
    store_ = std::move(*store);
    model_ = std::move(*model);
    for (EmbeddingStore* each : {store_.get(), model_.get()}) {
      ASSERT_TRUE(each->Configure(Script::Config()).ok());
    }
  }
  // Makes rows, or changes them.
  static void Train(EmbeddingStore& store, const std::vector<uint64_t>& signs, uint32_t dim) {
    const std::vector<float> gradients(signs.size() * dim, 0.25f);
    const RowBlock block = {.dim = dim, .signs = signs};
    Lookup(store, signs, dim);
    ASSERT_TRUE(store.Update({&block, 1}, gradients.data()).ok());
  }
  // The next rows that there have not been yet.
  std::vector<uint64_t> TrainNew(uint64_t count, uint32_t dim) {
    const auto signs = Range(num_rows_, num_rows_ + count);
    num_rows_ += count;
    for (EmbeddingStore* each : {store_.get(), model_.get()}) Train(*each, signs, dim);
    return signs;
  }
  uint64_t MemoryBytes() const { return store_->tier().stats()->memory_bytes; }

  PoolDirectory directory_;
  std::unique_ptr<EmbeddingStore> store_;
  std::unique_ptr<EmbeddingStore> model_;
  uint64_t num_rows_ = 0;
};

// Of which it has fewer when they are larger. What an update wrote to rows that have left it is
// there again.
TEST_F(TierMemoryTest, ACacheOfBytesHoldsAsManyRowsAsFitThere) {
  constexpr uint64_t kCacheBytes = 2 << 20;
  Open(kCacheBytes);
  for (const uint32_t dim : {4u, 96u, 20u}) {
    const auto signs = TrainNew(8000, dim);
    // Embedding, Adam's state and cell; padding at most.
    const uint64_t least = dim * 12 + 16, most = dim * 12 + 80;
    const uint64_t beside = num_rows_ * 40;
    const auto num_hot = [&] { return store_->tier().stats()->num_hot; };
    EXPECT_LE(num_hot(), kCacheBytes / least) << dim;
    EXPECT_GE(num_hot(), std::max(kCacheBytes - beside, kCacheBytes / 8) / 2 / most) << dim;
    ASSERT_EQ(Peek(*store_, signs, dim), Peek(*model_, signs, dim)) << dim;
  }
}

// The lists by which rows are evicted grow with a call. Their memory must not count against the
// rows once the call has ended: those would be fewer for as long as the store lives.
TEST_F(TierMemoryTest, ACallWithMoreRowsThanFitLeavesACacheThatIsInUse) {
  constexpr uint64_t kCacheBytes = 6 << 20, kRows = 80'000;
  constexpr uint32_t kDim = 4;
  Open(kCacheBytes);
  Lookup(*store_, Range(0, kRows), kDim);
  // The maintenance thread evicts down to the budget before it commits.
  auto batch = store_->tier().RequestCheckpoint();
  ASSERT_TRUE(batch.ok() && store_->tier().WaitCheckpoint(*batch, std::chrono::minutes(5)).ok());
  // A row takes 68 bytes and up to 32 of those lists; each has 25 of the index and 8 of a cell.
  const uint64_t beside = kRows * (25 + 8);
  const TierStats stats = store_->tier().stats().value();
  EXPECT_GE(stats.num_hot, (kCacheBytes - beside) / 16 * 15 / (68 + 32));
  EXPECT_LE(stats.hot_bytes, kCacheBytes - beside);
}

// Many small rows have to leave for each large one, also where the store's thread lags.
TEST_F(TierMemoryTest, RowsInMemoryStayWithinACacheOfBytesAfterEachCall) {
  constexpr uint64_t kCacheBytes = 8 << 20;
  Open(kCacheBytes);
  TrainNew(100'000, 4);
  for (uint64_t first = num_rows_; first < num_rows_ + 20'000; first += 4000) {
    Lookup(*store_, Range(first, first + 4000), 160);
    // A quarter at least is taken by what is known of all rows.
    ASSERT_LE(store_->tier().stats()->hot_bytes, kCacheBytes / 4 * 3) << first;
  }
}

// The index grows, and rows of one size take the place of others: what they leave is used for it,
// or goes back to the system.
TEST_F(TierMemoryTest, MemoryStaysWithinACacheOfBytes) {
  constexpr uint64_t kCacheBytes = 32 << 20;  // a block more or less is little beside it
  Open(kCacheBytes);
  std::vector<std::pair<uint32_t, std::vector<uint64_t>>> all;
  for (const uint32_t dim : {64u, 16u, 64u}) {
    for (int i = 0; i < 100; ++i) {
      all.emplace_back(dim, TrainNew(1000, dim));
      ASSERT_TRUE(Eventually([&] { return MemoryBytes() <= kCacheBytes / 10 * 11; }))
          << MemoryBytes() << " bytes with " << num_rows_ << " rows, the last ones of dim " << dim;
    }
    EXPECT_GE(MemoryBytes(), kCacheBytes * 3 / 4) << "what there is should be used";
  }
  for (const auto& [dim, signs] : all) {
    ASSERT_EQ(Peek(*store_, signs, dim), Peek(*model_, signs, dim));
  }
}

// Rows move to other cells while others look them up, change them and copy them.
TEST_F(TierMemoryTest, RowsMayBeUsedWhileMemoryIsGivenBack) {
  constexpr uint64_t kThreads = 3, kSteps = 60, kOwn = 200, kNew = 300;
  Open(1 << 20);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const uint64_t first = (t + 1) * 1'000'000;
      for (uint64_t step = 0; step < kSteps; ++step) {
        const uint32_t dim = step % 30 < 15 ? 24 : 8;
        for (EmbeddingStore* each : {store_.get(), model_.get()}) {
          Train(*each, Range(first, first + kOwn), 16);
          const uint64_t begin = first + kOwn + step * kNew;
          Train(*each, Range(begin, begin + kNew), dim);
        }
        if (step % 8 == t) static_cast<void>(store_->tier().RequestCheckpoint());
        if (t == 0 && step % 20 == 10) Script::Rows(*store_);  // one at a time
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Script::Rows(*store_), Script::Rows(*model_));
  EXPECT_GT(store_->tier().stats()->num_moved, 0u);
}

}  // namespace
}  // namespace persia::store

// Many threads on one store; most telling when built with ThreadSanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "store/store_test_util.h"

namespace persia::store {
namespace {

constexpr uint64_t kCapacity = 2000;
constexpr uint32_t kDim = 4;

std::vector<uint64_t> DistinctSigns(std::mt19937& random, uint64_t limit) {
  std::vector<uint64_t> signs(100);
  for (uint64_t& sign : signs) sign = random() % limit;
  std::sort(signs.begin(), signs.end());
  signs.erase(std::unique(signs.begin(), signs.end()), signs.end());
  return signs;
}

// A row is written as a whole under its shard's lock,
// always with equal elements: unequal ones were torn.
void ExpectWhole(const std::vector<float>& rows) {
  for (size_t i = 0; i < rows.size(); i += kDim) {
    for (size_t j = 1; j < kDim; ++j) ASSERT_EQ(rows[i], rows[i + j]);
  }
}

void TrainAndCheck(EmbeddingStore& store, uint32_t seed, int steps) {
  std::mt19937 random(seed);
  for (int step = 0; step < steps; ++step) {
    const auto signs = DistinctSigns(random, 3 * kCapacity);
    ExpectWhole(Lookup(store, signs, kDim));
    Update(store, signs, kDim, std::vector<float>(signs.size() * kDim, 0.001f));
    ExpectWhole(Peek(store, signs, kDim));
  }
}

TEST(StressTest, LookupsUpdatesEvictionsClearAndConfigureAtOnce) {
  TrainConfig config = SgdConfig(0.1f);
  config.initializer = {.lower = 0.5f, .upper = 0.5f, .seed = 0};
  auto store = MakeStore({.capacity = kCapacity, .num_internal_shards = 4}, config);
  std::vector<std::thread> trainers;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    trainers.emplace_back([&store, seed] { TrainAndCheck(*store, seed, 400); });
  }
  std::atomic<bool> stop = false;
  std::thread operator_thread([&] {
    for (int i = 1; !stop.load(); ++i) {
      TrainConfig changed = config;
      changed.optimizer.lr = 0.1f / static_cast<float>(1 + i % 5);
      EXPECT_TRUE(store->Configure(changed, /*replace=*/true).ok());
      EXPECT_LE(store->stats().num_rows, kCapacity);
      EXPECT_TRUE(store->config().has_value());
      if (i % 64 == 0) store->Clear();
      std::this_thread::yield();
    }
  });
  for (std::thread& trainer : trainers) trainer.join();
  stop = true;
  operator_thread.join();
  EXPECT_LE(store->size(), kCapacity);
  const StoreStats stats = store->stats();
  EXPECT_GT(stats.lookups.num_evicted, 0u);
  EXPECT_GT(stats.updates.num_updated, 0u);
}

// No update may be lost: every thread adds to the same rows.
TEST(StressTest, ConcurrentUpdatesAllArrive) {
  constexpr int kThreads = 4, kSteps = 500;
  TrainConfig config = SgdConfig(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  config.weight_bound = 0.0f;
  auto store = MakeStore({.capacity = 1000, .num_internal_shards = 2}, config);
  std::vector<uint64_t> signs(50);
  for (size_t i = 0; i < signs.size(); ++i) signs[i] = i;
  Lookup(*store, signs, kDim);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      const std::vector<float> gradients(signs.size() * kDim, -1.0f);
      for (int step = 0; step < kSteps; ++step) Update(*store, signs, kDim, gradients);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Peek(*store, signs, kDim),
            std::vector<float>(signs.size() * kDim, float{kThreads} * kSteps));
}

// Rows of two dims share blocks, which move to huge pages while others write to them.
TEST(StressTest, WritesArriveInMemoryThatMovesToHugePages) {
  constexpr int kThreads = 3, kSteps = 100;
  constexpr uint64_t kRowsAStep = 1000;
  const auto dim_of = [](uint64_t step) { return step % 2 == 0 ? 8u : 60u; };
  const auto signs_of = [](uint64_t step) {
    return Range(step * kRowsAStep, (step + 1) * kRowsAStep);
  };
  TrainConfig config = SgdConfig(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  config.weight_bound = 0.0f;
  auto store = MakeStore({.capacity = 1'000'000, .num_internal_shards = 4}, config);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (uint64_t step = 0; step < kSteps; ++step) {
        const auto signs = signs_of(step);
        const std::vector<float> gradients(signs.size() * dim_of(step), -1.0f);
        Lookup(*store, signs, dim_of(step));
        Update(*store, signs, dim_of(step), gradients);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint64_t step = 0; step < kSteps; ++step) {
    ASSERT_EQ(Peek(*store, signs_of(step), dim_of(step)),
              std::vector<float>(kRowsAStep * dim_of(step), float{kThreads}));
  }
}

}  // namespace
}  // namespace persia::store

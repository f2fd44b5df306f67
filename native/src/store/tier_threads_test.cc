// Threads that train a store with a tier while it reads ahead and takes checkpoints.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "store/store_tier.h"
#include "store/tier_fixture_test_util.h"

namespace persia::store {
namespace {

using TierThreadsTest = TierTest;

// Each thread's rows count its steps, so a row alone shows whether it is of a whole update.
TEST_F(TierThreadsTest, ThreadsTrainWhileCheckpointsAreTaken) {
  constexpr int kThreads = 3, kSteps = 150;
  constexpr uint64_t kRows = 40;
  TrainConfig config = SgdConfig(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  config.weight_bound = 0.0f;
  Open();
  ASSERT_TRUE(store_->Configure(config).ok());
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto signs = Range(t * kRows, (t + 1) * kRows);
      for (int step = 0; step < kSteps; ++step) {
        Lookup(*store_, signs, 2);
        Update(*store_, signs, 2, std::vector<float>(signs.size() * 2, -1.0f));
        if (step % 8 == static_cast<int>(t)) static_cast<void>(store_->tier().RequestCheckpoint());
        store_->tier().Prefetch(signs);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Checkpoint();
  Open();
  EXPECT_EQ(Peek(*store_, Range(0, kThreads * kRows), 2),
            std::vector<float>(kThreads * kRows * 2, float{kSteps}));
}

// Rows are read with the shard open to others: some change and are back in the pool, at the same
// place, before the reader has its turn, who must not bring the old values.
TEST_F(TierThreadsTest, ThreadsTrainWhileTheirRowsAreReadAhead) {
  constexpr int kThreads = 2, kSteps = 1000;
  constexpr uint64_t kRows = 96;  // twice as many as the cache has
  TrainConfig config = SgdConfig(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  config.weight_bound = 0.0f;
  Open();
  ASSERT_TRUE(store_->Configure(config).ok());
  std::atomic<int> num_training = kThreads;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int step = 0; step < kSteps; ++step) {
        for (uint64_t first = t * kRows; first < (t + 1) * kRows; first += kRows / 4) {
          const auto signs = Range(first, first + kRows / 4);
          const std::vector<float> rows = Lookup(*store_, signs, 2);
          EXPECT_EQ(rows, std::vector<float>(rows.size(), static_cast<float>(step)));
          Update(*store_, signs, 2, std::vector<float>(rows.size(), -1.0f));
        }
      }
      --num_training;
    });
  }
  std::vector<float> before(kThreads * kRows * 2);
  while (num_training > 0) {
    store_->tier().Prefetch(Range(0, kThreads * kRows));
    const std::vector<float> now = Peek(*store_, Range(0, kThreads * kRows), 2);
    for (size_t i = 0; i < now.size(); ++i) EXPECT_GE(now[i], before[i]) << "of before";
    before = now;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(store_->tier().stats()->num_prefetched, 0u);
}

// Each update is in the checkpoint as a whole or not at all, and the last one before it is.
TEST_F(TierThreadsTest, ThreadsTrainPastACheckpointThatIsOfOneMoment) {
  constexpr uint64_t kThreads = 3, kRows = 40;
  TrainConfig config = SgdConfig(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  config.weight_bound = 0.0f;
  const auto signs_of = [](uint64_t t) { return Range(t * kRows, (t + 1) * kRows); };
  Open();
  ASSERT_TRUE(store_->Configure(config).ok());
  std::array<std::atomic<int>, kThreads> num_steps{};
  for (int round = 0; round < 3; ++round) {
    std::atomic<bool> stops = false;
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const auto signs = signs_of(t);
        while (!stops) {
          Lookup(*store_, signs, 2);
          Update(*store_, signs, 2, std::vector<float>(signs.size() * 2, -1.0f));
          ++num_steps[t];
        }
      });
    }
    const auto wait_for_steps = [&] {
      for (const auto& steps : num_steps) {
        const int end = steps + 3;
        EXPECT_TRUE(Eventually([&] { return steps >= end; }));
      }
    };
    wait_for_steps();
    std::array<int, kThreads> before{}, after{};
    for (uint64_t t = 0; t < kThreads; ++t) before[t] = num_steps[t];
    auto batch = store_->tier().RequestCheckpoint();
    for (uint64_t t = 0; t < kThreads; ++t) after[t] = num_steps[t] + 1;
    wait_for_steps();
    EXPECT_TRUE(batch.ok());
    EXPECT_TRUE(store_->tier().WaitCheckpoint(*batch, std::chrono::minutes(1)).ok());
    stops = true;
    for (std::thread& thread : threads) thread.join();
    Open();
    for (uint64_t t = 0; t < kThreads; ++t) {
      const std::vector<float> rows = Peek(*store_, signs_of(t), 2);
      EXPECT_EQ(rows, std::vector<float>(rows.size(), rows[0]));
      const int steps = static_cast<int>(rows[0]);
      EXPECT_TRUE(before[t] <= steps && steps <= after[t])
          << before[t] << " " << steps << " " << after[t];
      num_steps[t] = steps;
    }
  }
}

// Checkpoints are held and committed or dropped in turns meanwhile.
TEST_F(TierThreadsTest, ThreadsTrainWhileCheckpointsAreHeld) {
  constexpr uint64_t kBatches = 400;
  Create();
  std::atomic<uint64_t> num_trained{0};
  std::jthread trainer([&] {
    for (uint64_t batch = 1; batch <= kBatches; ++batch) {
      EXPECT_TRUE(Script::Train(*store_, batch).ok());
      num_trained = batch;
    }
  });
  uint64_t num_committed = 0;
  for (bool commits = true; num_trained < kBatches; commits = !commits) {
    auto number = store_->tier().RequestCheckpoint(/*held=*/true);
    ASSERT_TRUE(number.ok()) << number.status().ToString();
    if (commits) PreparedOf(*store_, *number);
    ASSERT_TRUE((commits ? store_->tier().CommitCheckpoint(*number)
                         : store_->tier().DropCheckpoint(*number))
                    .ok());
    num_committed += commits;
  }
  trainer.join();
  EXPECT_GT(num_committed, 0u);
  Checkpoint();
  Open();
  EXPECT_EQ(Script::Rows(*store_), ScriptModel().RowsAt(kBatches));
}

}  // namespace
}  // namespace persia::store

#include "checkpoint/dump_throttle.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <stop_token>
#include <thread>

#include "checkpoint/checkpoint_test_util.h"
#include "checkpoint/trainers_test_util.h"

namespace persia::checkpoint {
namespace {

using store::Range;

constexpr uint64_t kNumRows = 20'000;
// At this share a dump takes days.
const Snapshot::Options kSlow{.max_gathered_bytes = 1, .max_processors = 1e-8};

class DumpThrottleTest : public testing::Test {
 protected:
  DumpThrottleTest() { store::Lookup(*store_, Range(0, kNumRows), 16); }

  void Begin(const Snapshot::Options& options) {
    snapshot_ = BeginSnapshot(*store_, options);
    part_ = snapshot_->part(0).value();
  }
  void TrainOneRow() { store::Update(*store_, {0}, 16, Gradients(16, 0.5f)); }
  std::jthread TrainOn() {
    return std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) TrainOneRow();
    });
  }
  std::future<Status> ReadInBackground() {
    return std::async(std::launch::async, [this] { return ReadAll(*part_, &file_); });
  }

  const std::unique_ptr<store::EmbeddingStore> store_ =
      store::MakeStore({.capacity = 100'000, .num_internal_shards = 1});
  std::unique_ptr<Snapshot> snapshot_;
  SnapshotPart* part_ = nullptr;
  Bytes file_;
};

TEST_F(DumpThrottleTest, AStoreThatIsNotTrainedIsDumpedAtFullSpeed) {
  TrainOneRow();
  const Rows before = RowsOf(*store_);
  Begin(kSlow);
  ASSERT_TRUE(ReadAll(*part_, &file_).ok());
  EXPECT_EQ(RowsOf({file_}), before);
}

TEST_F(DumpThrottleTest, WritersAreThrottledUntilTrainingEnds) {
  const Rows before = RowsOf(*store_);
  Begin(kSlow);
  TrainOneRow();
  std::jthread trainer = TrainOn();
  auto result = ReadInBackground();
  // Without throttling it takes some hundredths of a second; this one still runs.
  EXPECT_EQ(result.wait_for(std::chrono::milliseconds(700)), std::future_status::timeout);
  EXPECT_LT(part_->num_rows(), kNumRows);
  trainer = {};  // ends
  ASSERT_TRUE(result.get().ok());
  EXPECT_EQ(RowsOf({file_}), before);
}

TEST_F(DumpThrottleTest, ClosingEndsThrottling) {
  Begin(kSlow);
  TrainOneRow();
  std::jthread trainer = TrainOn();
  auto result = ReadInBackground();
  EXPECT_EQ(result.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  snapshot_->Close();
  EXPECT_EQ(result.get().code(), StatusCode::kFailedPrecondition);  // during training
  trainer = {};                                                     // ends
}

// Else these would fill their limit, and training would wait.
TEST_F(DumpThrottleTest, WritersRunAtFullSpeedWhereSavedRowsNeedRoom) {
  Snapshot::Options options = kSlow;
  options.rows.max_waiting_bytes = 1'600'000;
  Begin(options);
  TrainOneRow();
  // 96 bytes each: more than three quarters of the limit, and less than all of it.
  constexpr uint64_t kNumSaved = 14'500;
  store::Lookup(*store_, Range(0, kNumSaved), 16);
  std::jthread trainer = TrainOn();
  auto result = ReadInBackground();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  // From 12,500 on they need less and it is throttled. Without the need no row would be read.
  constexpr uint64_t kNumRead = 1'000;
  while (part_->num_rows() < kNumRead && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_GE(part_->num_rows(), kNumRead);
  trainer = {};  // ends
  snapshot_->Close();
  result.wait();
}

}  // namespace
}  // namespace persia::checkpoint

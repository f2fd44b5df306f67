#include "checkpoint/dump_pace.h"

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
// At this pace a dump takes days.
constexpr Snapshot::Options kSlow{.max_gathered_bytes = 1, .max_processors = 1e-8};

class DumpPaceTest : public testing::Test {
 protected:
  DumpPaceTest() { store::Lookup(*store_, Range(0, kNumRows), 16); }

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

TEST_F(DumpPaceTest, NobodyRestsWhereNobodyTrains) {
  TrainOneRow();
  const Rows before = RowsOf(*store_);
  Begin(kSlow);
  ASSERT_TRUE(ReadAll(*part_, &file_).ok());
  EXPECT_EQ(RowsOf({file_}), before);
}

TEST_F(DumpPaceTest, WritersRestUntilTrainingEnds) {
  const Rows before = RowsOf(*store_);
  Begin(kSlow);
  TrainOneRow();
  std::jthread trainer = TrainOn();
  auto result = ReadInBackground();
  // Without a rest it takes some hundredths of a second; and this one still goes on.
  EXPECT_EQ(result.wait_for(std::chrono::milliseconds(700)), std::future_status::timeout);
  EXPECT_LT(part_->num_rows(), kNumRows);
  trainer = {};  // ends
  ASSERT_TRUE(result.get().ok());
  EXPECT_EQ(RowsOf({file_}), before);
}

TEST_F(DumpPaceTest, ClosingEndsARest) {
  Begin(kSlow);
  TrainOneRow();
  std::jthread trainer = TrainOn();
  auto result = ReadInBackground();
  EXPECT_EQ(result.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  snapshot_->Close();
  EXPECT_EQ(result.get().code(), StatusCode::kFailedPrecondition);  // while training goes on
  trainer = {};                                                     // ends
}

// Else these would fill their limit, and training would wait.
TEST_F(DumpPaceTest, NobodyRestsWhereSavedRowsNeedRoom) {
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
  // Where they need less, at 12,500, it rests: some have come until then, and without need none
  // does.
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

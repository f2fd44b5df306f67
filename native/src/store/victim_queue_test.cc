// VictimQueue: which rows go first.
#include "store/victim_queue.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace persia::store {
namespace {

class VictimQueueTest : public testing::Test {
 protected:
  // Keys are numbered from 0.
  uint64_t Add(uint32_t stamp) {
    EXPECT_TRUE(index_.Insert({next_key_, 0, stamp}));
    return next_key_++;
  }
  uint64_t Pop() {
    SignIndex::Entry* entry = queue_.Pop(index_);
    const uint64_t key = entry->key;
    index_.Erase(entry);
    return key;
  }

  SignIndex index_;
  uint64_t next_key_ = 0;
  VictimQueue queue_;
};

TEST_F(VictimQueueTest, GivesRowsInTheOrderOfTheirStamps) {
  std::mt19937 random(3);
  constexpr int kRows = 20'000;
  for (int i = 0; i < kRows; ++i) Add(random() % (1u << (1 + random() % 31)));
  uint32_t last = 0;
  for (int i = 0; i < kRows; ++i) {
    SignIndex::Entry* entry = queue_.Pop(index_);
    ASSERT_GE(entry->stamp, last) << i;
    last = entry->stamp;
    index_.Erase(entry);
  }
  EXPECT_EQ(index_.size(), 0u);
}

TEST_F(VictimQueueTest, SkipsRowsThatWereTouchedOrMadeAnewSinceTheyWereCollected) {
  for (uint32_t stamp = 1; stamp <= 40; ++stamp) Add(stamp);
  EXPECT_EQ(Pop(), 0u);  // collects the oldest quarter
  index_.Find(1)->stamp = 50;
  index_.Erase(index_.Find(2));
  ASSERT_TRUE(index_.Insert({2, 0, 51}));
  for (uint64_t key = 3; key < 40; ++key) EXPECT_EQ(Pop(), key);
  EXPECT_EQ(Pop(), 1u);
  EXPECT_EQ(Pop(), 2u);
}

TEST_F(VictimQueueTest, RebasedStampsKeepTheOrderOfTheLastTwoThousandMillionBatches) {
  for (uint32_t stamp : {7u, kStampRebase - 1, kStampRebase + 5, kLastStamp}) Add(stamp);
  RebaseStamps(index_);
  EXPECT_EQ(index_.Find(0)->stamp, 0u);
  EXPECT_EQ(index_.Find(1)->stamp, 0u);
  EXPECT_EQ(index_.Find(2)->stamp, 5u);
  EXPECT_EQ(index_.Find(3)->stamp, kLastStamp - kStampRebase);
}

}  // namespace
}  // namespace persia::store

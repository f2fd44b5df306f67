// The log of a standby: order, bounds, and when it may take over.
#include "server/operation_log.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "net/test_support.h"

namespace persia::server {
namespace {

using net::testing::In;
using net::testing::Soon;
using std::chrono::milliseconds;

constexpr uint64_t kPrimary = 1, kStandby = 2;

class OperationLogTest : public ::testing::Test {
 protected:
  explicit OperationLogTest(uint64_t max_bytes = 1 << 20, milliseconds lease = milliseconds(200))
      : log(
            {.standby = kStandby, .max_bytes = max_bytes, .lease = lease},
            [this](uint8_t method, const Buffer&) {
              applied.push_back(method);
              // Else the standby would be unfit before it takes over.
              while (method == kLateBad && log.state() != OperationLog::State::kTakenOver) {
                std::this_thread::yield();
              }
              return method == kBad || method == kLateBad ? ResourceExhausted("no memory")
                                                          : Status::Ok();
            },
            [](ReplicateKind, std::span<const std::byte>) { return Status::Ok(); }) {
    log.Follow(kPrimary);
  }
  Status Send(ReplicateKind kind) { return log.Take({kPrimary, kStandby, kind, 0, 0, {}}, Soon()); }
  Status Add(uint64_t number, uint8_t method, net::Clock::time_point deadline = Soon()) {
    return log.Take({kPrimary, kStandby, ReplicateKind::kOperation, method, number, body},
                    deadline);
  }

  static constexpr uint8_t kBad = 99, kLateBad = 98;
  const std::vector<std::byte> body = std::vector<std::byte>(8);
  std::vector<uint8_t> applied;  // by the thread of the log, which TakeOver() joins
  OperationLog log;
};

TEST_F(OperationLogTest, WaitsForThePredecessorAndTakesRepetitionsOnce) {
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  std::thread late([&] { EXPECT_TRUE(Add(1, 11).ok()); });
  EXPECT_EQ(Add(2, 12, In(20)).code(), StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Add(0, 10).ok());
  late.join();
  EXPECT_TRUE(Add(0, 10).ok());
  ASSERT_TRUE(log.TakeOver(true).ok());
  EXPECT_EQ(applied, (std::vector<uint8_t>{10, 11}));
  EXPECT_EQ(Add(2, 12).code(), StatusCode::kFailedPrecondition);
}

TEST_F(OperationLogTest, AppliesNothingBeforeItHasTheCopy) {
  ASSERT_TRUE(Add(0, 10).ok());
  EXPECT_EQ(log.TakeOver(true).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(log.num_waiting(), 1u);
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  ASSERT_TRUE(log.TakeOver(true).ok());
  EXPECT_EQ(applied, (std::vector<uint8_t>{10}));
}

// With a lease that is longer than a busy machine keeps this thread waiting.
class LongLeaseTest : public OperationLogTest {
 protected:
  static constexpr milliseconds kLease{2000};
  LongLeaseTest() : OperationLogTest(1 << 20, kLease) {}
};

TEST_F(LongLeaseTest, EachMessageExtendsTheLeaseOfThePrimary) {
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  EXPECT_EQ(log.TakeOver(false).code(), StatusCode::kUnavailable);
  std::this_thread::sleep_for(kLease * 1.3);
  ASSERT_TRUE(Send(ReplicateKind::kHeartbeat).ok());
  EXPECT_EQ(log.TakeOver(false).code(), StatusCode::kUnavailable);
  std::this_thread::sleep_for(kLease * 1.3);
  EXPECT_TRUE(log.TakeOver(false).ok());
  EXPECT_EQ(Send(ReplicateKind::kHeartbeat).code(), StatusCode::kFailedPrecondition);
  EXPECT_FALSE(log.Renounce());
}

TEST_F(OperationLogTest, OneThatHasRenouncedNeverTakesOver) {
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  EXPECT_TRUE(log.Renounce());
  EXPECT_EQ(log.TakeOver(true).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Send(ReplicateKind::kHeartbeat).code(), StatusCode::kFailedPrecondition);
}

TEST_F(OperationLogTest, AnOperationThatFailsMakesItUnfit) {
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  ASSERT_TRUE(Add(0, kBad).ok());
  while (log.state() == OperationLog::State::kFollowing) std::this_thread::yield();
  const Status refused = Send(ReplicateKind::kHeartbeat);
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("no memory"), std::string::npos) << refused.ToString();
  EXPECT_FALSE(log.TakeOver(true).ok());
}

TEST_F(OperationLogTest, DoesNotCountTheOperationsOfAnotherPrimaryAsRepeated) {
  ASSERT_TRUE(Add(0, 10).ok());
  log.Follow(kPrimary);
  EXPECT_EQ(log.state(), OperationLog::State::kFollowing);
  log.Follow(kPrimary + 7);
  const Status refused =
      log.Take({kPrimary + 7, kStandby, ReplicateKind::kHeartbeat, 0, 0, {}}, Soon());
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("of another primary"), std::string::npos) << refused.ToString();
  EXPECT_EQ(log.state(), OperationLog::State::kUnfit);
}

TEST_F(OperationLogTest, MayFollowAnotherPrimaryBeforeTheFirstMessage) {
  log.Follow(kPrimary + 7);
  log.Follow(kPrimary);
  ASSERT_TRUE(Add(0, 10).ok());
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  ASSERT_TRUE(log.TakeOver(true).ok());
  EXPECT_EQ(applied, (std::vector<uint8_t>{10}));
}

TEST_F(OperationLogTest, TheLastOperationOfTheLogMayFailTheTakeOver) {
  ASSERT_TRUE(Add(0, kLateBad).ok());
  ASSERT_TRUE(Send(ReplicateKind::kCopyEnd).ok());
  for (int i = 0; i < 2; ++i) {  // asked again, too
    EXPECT_EQ(log.TakeOver(true).code(), StatusCode::kResourceExhausted);
  }
}

class FullLogTest : public OperationLogTest {
 protected:
  FullLogTest() : OperationLogTest(16) {}
};

TEST_F(FullLogTest, IsUnfitWhereTheCopyTakesTooLong) {
  ASSERT_TRUE(Add(0, 10).ok());
  ASSERT_TRUE(Add(1, 11).ok());
  const Status refused = Add(2, 12);
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.ToString();
  EXPECT_EQ(log.state(), OperationLog::State::kUnfit);
}

}  // namespace
}  // namespace persia::server

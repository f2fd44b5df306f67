#include "server/update_deduplicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <new>
#include <thread>
#include <vector>

namespace persia::server {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point Later() { return Clock::now() + std::chrono::seconds(30); }

class UpdateDeduplicatorTest : public ::testing::Test {
 protected:
  // Sends the key; the reply's staleness tells which application it comes from.
  uint64_t Send(const BatchKey& key, bool* repeated) {
    auto reply = updates_.Once(
        key, Later(), [this] { return UpdateResult{++num_applied_, 0, 0}; }, repeated);
    return reply.ok() ? reply->staleness : 0;
  }
  bool Repeated(const BatchKey& key) {
    bool repeated = false;
    Send(key, &repeated);
    return repeated;
  }

  UpdateDeduplicator updates_{{.keys_per_worker = 4, .workers = 2}};
  std::atomic<uint64_t> num_applied_{0};
};

TEST_F(UpdateDeduplicatorTest, RepeatedKeyGetsTheFirstReply) {
  bool repeated = true;
  EXPECT_EQ(Send({1, 1}, &repeated), 1u);
  EXPECT_FALSE(repeated);
  EXPECT_EQ(Send({1, 2}, &repeated), 2u);
  EXPECT_EQ(Send({1, 1}, &repeated), 1u);
  EXPECT_TRUE(repeated);
  EXPECT_EQ(num_applied_, 2u);
}

TEST_F(UpdateDeduplicatorTest, WorkersDoNotShareReferences) {
  EXPECT_FALSE(Repeated({1, 7}));
  EXPECT_FALSE(Repeated({2, 7}));
  EXPECT_TRUE(Repeated({1, 7}));
}

TEST_F(UpdateDeduplicatorTest, AnUpdateThatThrowsMayBeTriedAgain) {
  bool repeated = true;
  const auto reply = updates_.Once(
      {1, 1}, Later(), []() -> StatusOr<UpdateResult> { throw std::bad_alloc(); }, &repeated);
  EXPECT_EQ(reply.status().code(), StatusCode::kInternal);
  EXPECT_FALSE(repeated);
  EXPECT_EQ(Send({1, 1}, &repeated), 1u);
  EXPECT_FALSE(repeated);
}

TEST_F(UpdateDeduplicatorTest, OldestKeyOfAWorkerIsForgottenFirst) {
  for (uint64_t reference = 1; reference <= 5; ++reference) EXPECT_FALSE(Repeated({1, reference}));
  for (uint64_t reference = 2; reference <= 5; ++reference) EXPECT_TRUE(Repeated({1, reference}));
  EXPECT_FALSE(Repeated({1, 1}));
}

TEST_F(UpdateDeduplicatorTest, LeastRecentlyUsedWorkerIsForgotten) {
  EXPECT_FALSE(Repeated({1, 1}));
  EXPECT_FALSE(Repeated({2, 1}));
  EXPECT_TRUE(Repeated({1, 1}));   // uses worker 1
  EXPECT_FALSE(Repeated({3, 1}));  // worker 2 goes
  EXPECT_TRUE(Repeated({1, 1}));
  EXPECT_FALSE(Repeated({2, 1}));
}

TEST_F(UpdateDeduplicatorTest, FailureIsNotRemembered) {
  bool repeated = false;
  auto failed = updates_.Once(
      {1, 1}, Later(), [] { return StatusOr<UpdateResult>(FailedPrecondition("not yet")); },
      &repeated);
  EXPECT_EQ(failed.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Repeated({1, 1}));
  EXPECT_TRUE(Repeated({1, 1}));
}

TEST_F(UpdateDeduplicatorTest, RepetitionGivesUpAtItsDeadlineWhileTheFirstIsApplied) {
  std::promise<void> entered;
  std::promise<void> release;
  std::thread first([&] {
    bool repeated = false;
    auto reply = updates_.Once(
        {1, 1}, Later(),
        [&] {
          entered.set_value();
          release.get_future().wait();
          return UpdateResult{42, 0, 0};
        },
        &repeated);
    EXPECT_TRUE(reply.ok());
  });
  entered.get_future().wait();
  bool repeated = false;
  auto late = updates_.Once({1, 1}, Clock::now(), [] { return UpdateResult{}; }, &repeated);
  EXPECT_EQ(late.status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(Repeated({1, 2}));  // others are not held up
  release.set_value();
  first.join();
  EXPECT_EQ(Send({1, 1}, &repeated), 42u);
}

TEST_F(UpdateDeduplicatorTest, ConcurrentRepetitionsApplyOnce) {
  for (uint64_t reference = 1; reference <= 50; ++reference) {
    num_applied_ = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        bool repeated = false;
        EXPECT_EQ(Send({1, reference}, &repeated), 1u);
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(num_applied_, 1u);
  }
}

}  // namespace
}  // namespace persia::server

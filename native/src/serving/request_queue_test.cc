// RequestQueue without a front: each request ends exactly once.
#include "serving/request_queue.h"

#include <gtest/gtest.h>

#include <thread>

#include "serving/serving_test_util.h"

namespace persia::serving {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

class Request : public Waiting {
 public:
  Request(Clock::time_point deadline, const std::string& batch)
      : Waiting(DecodeSamples(BytesOf(batch)).value(), deadline) {}
  void Answer(const Prediction&, uint32_t) override { ++num_ended; }
  void Fail(GrpcCode, const std::string&) override { ++num_ended; }

  int num_ended = 0;
};

std::shared_ptr<Request> RequestFor(std::chrono::milliseconds time,
                                    const std::string& batch = BatchOf({7}, {1})) {
  return std::make_shared<Request>(Clock::now() + time, batch);
}

constexpr std::chrono::seconds kLate{-1};
constexpr std::chrono::seconds kLong{1000};

TEST(RequestQueueTest, ARefusalLosesNoRequestThatWaits) {
  RequestQueue queue({.max_queued = 1});
  const auto late = RequestFor(kLate);
  ASSERT_TRUE(queue.Submit(late).ok());
  queue.Close();
  EXPECT_EQ(queue.Submit(RequestFor(kLong)).code(), StatusCode::kUnavailable);
  EXPECT_EQ(late->num_ended, 0);
  EXPECT_EQ(queue.Next(), nullptr);
  EXPECT_EQ(late->num_ended, 1);
}

// Ending a request of Python takes the lock of its interpreter.
TEST(RequestQueueTest, SubmittingEndsNoOtherRequest) {
  RequestQueue queue({.max_queued = 1});
  const auto late = RequestFor(kLate);
  ASSERT_TRUE(queue.Submit(late).ok());
  EXPECT_EQ(queue.Submit(RequestFor(kLong)).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(late->num_ended, 0);
  EXPECT_EQ(late.use_count(), 2);
}

TEST(RequestQueueTest, ABatchEndsOnce) {
  RequestQueue queue({});
  const auto request = RequestFor(kLong);
  ASSERT_TRUE(queue.Submit(request).ok());
  const auto batch = queue.Next();
  batch->Answer({"m", "7", {}, {}});
  batch->Fail(GrpcCode::kInternal, "");
  batch->Answer({"m", "7", {}, {}});
  EXPECT_TRUE(batch->Split().empty());
  EXPECT_EQ(request->num_ended, 1);
  EXPECT_EQ(queue.num_running(), 0u);
  // After a large batch that took longer, the estimate counts samples: it is wrong if some are
  // counted twice or not at all.
  ASSERT_TRUE(queue.Submit(RequestFor(kLong, BatchOf({7, 8, 9}, {1, 2, 3}))).ok());
  const auto large = queue.Next();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  large->Answer({"m", "7", {}, {}});
  large->Fail(GrpcCode::kInternal, "");
  ASSERT_TRUE(queue.Submit(RequestFor(kLong)).ok());
  const auto running = queue.Next();
  EXPECT_TRUE(queue.Submit(RequestFor(kLong)).ok());
}

// The last part of a batch waits for the others: its time says nothing of how long a batch takes.
TEST(RequestQueueTest, PartsOfABatchDoNotCountForEstimates) {
  RequestQueue queue({});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(queue.Submit(RequestFor(kLong)).ok());
  {
    const auto parts = queue.Next()->Split();
    ASSERT_EQ(parts.size(), 20u);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  ASSERT_TRUE(queue.Submit(RequestFor(kLong)).ok());
  const auto running = queue.Next();
  EXPECT_TRUE(queue.Submit(RequestFor(std::chrono::seconds(5))).ok());
}

// Some of them may be slow, though the whole one has failed at once.
TEST(RequestQueueTest, PartsOfABatchAreAheadOfWhatIsQueued) {
  RequestQueue queue({});
  const auto next = [&](int num_requests) {
    for (int i = 0; i < num_requests; ++i) EXPECT_TRUE(queue.Submit(RequestFor(kLong)).ok());
    return queue.Next();
  };
  {
    const auto batch = next(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    batch->Answer({"m", "7", {}, {}});
  }
  for (int i = 0; i < 20; ++i) {
    auto parts = next(20)->Split();
    // Of the 21 batches of 0.5 s to come it has time for three, then for 11.
    const auto refused = [&] { return RequestFor(std::chrono::milliseconds(1800)); };
    EXPECT_EQ(queue.Submit(refused()).code(), StatusCode::kResourceExhausted);
    parts.resize(10);
    EXPECT_EQ(queue.Submit(refused()).code(), StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(queue.num_running(), 0u);
  // Batches that have failed at once have not made the server faster.
  const auto running = next(1);
  EXPECT_EQ(queue.Submit(RequestFor(std::chrono::milliseconds(300))).code(),
            StatusCode::kResourceExhausted);
}

TEST(RequestQueueTest, ReservationsAreForgotten) {
  using std::chrono::milliseconds;
  Reservations reservations;
  const Clock::time_point begin{milliseconds(1'000'000)};
  const int64_t slice = reservations.Add(begin);
  reservations.Add(begin + milliseconds(49));
  const int64_t next = reservations.Add(begin + milliseconds(50));
  EXPECT_EQ(reservations.Count(begin + milliseconds(99)), 3u);
  reservations.Remove(slice);
  EXPECT_EQ(reservations.Count(begin + milliseconds(99)), 2u);
  EXPECT_EQ(reservations.Count(begin + milliseconds(100)), 1u);
  reservations.Add(begin + milliseconds(100));
  reservations.Remove(slice);  // of a time that was forgotten
  reservations.Remove(next);
  EXPECT_EQ(reservations.Count(begin + milliseconds(149)), 1u);
  EXPECT_EQ(reservations.Count(begin + milliseconds(500)), 0u);
}

// Computes a batch of one request within half a second or more.
void ComputeSlowly(RequestQueue* queue, const std::string& content = BatchOf({7}, {1})) {
  ASSERT_TRUE(queue->Submit(RequestFor(kLong, content)).ok());
  const auto batch = queue->Next();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  batch->Answer({"m", "7", {}, {}});
}

// Whether requests are refused before any of the admitted ones has arrived.
bool AdmitsFew(RequestQueue* queue, std::chrono::seconds left) {
  const auto deadline = Clock::now() + left;
  std::vector<RequestQueue::Place> places;
  while (places.size() < 10'000) {
    auto place = queue->Admit(deadline);
    if (!place.ok()) break;
    places.push_back(std::move(place).value());
  }
  const bool is_refused = !places.empty() && places.size() < 10'000;
  places.clear();
  return is_refused && queue->Admit(deadline).ok();
}

// Header fields arrive long before messages where many requests come at once.
TEST(RequestQueueTest, AdmittedRequestsCountBeforeTheyArrive) {
  RequestQueue queue({.max_batch_size = 1});
  ComputeSlowly(&queue);
  EXPECT_TRUE(AdmitsFew(&queue, std::chrono::seconds(10))) << "an idle server";
  ASSERT_TRUE(queue.Submit(RequestFor(kLong)).ok());
  EXPECT_TRUE(AdmitsFew(&queue, std::chrono::seconds(10)));
}

TEST(RequestQueueTest, AdmittedRequestsCountAsQueued) {
  RequestQueue queue({.max_queued = 4});
  EXPECT_TRUE(AdmitsFew(&queue, kLong));
}

// Else each of them sends its message to be refused.
TEST(RequestQueueTest, WhatIsAdmittedIsTakenWhereAllHaveOneSize) {
  RequestQueue queue({.max_batch_size = 1});
  ComputeSlowly(&queue);
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  const auto submit = [&] {
    return queue.Submit(std::make_shared<Request>(deadline, BatchOf({7}, {1}))).ok();
  };
  while (submit()) ASSERT_LT(queue.num_waiting(), 1000u);
  EXPECT_FALSE(queue.Admit(deadline).ok());
}

// A request of the usual size would be refused.
TEST(RequestQueueTest, ASmallRequestBesideLargeOnesIsAdmitted) {
  RequestQueue queue({});
  const std::string large = BatchOf(std::vector<uint64_t>(100, 7), std::vector<float>(100, 1));
  const auto began = Clock::now();
  ComputeSlowly(&queue, large);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
  ASSERT_TRUE(queue.Submit(RequestFor(kLong)).ok());
  queue.Next()->Answer({"m", "7", {}, {}});
  ASSERT_TRUE(queue.Submit(RequestFor(kLong)).ok());
  EXPECT_TRUE(queue.Admit(Clock::now() + took).ok());
  EXPECT_EQ(queue.Submit(RequestFor(took, large)).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(queue.Submit(RequestFor(took)).ok());
}

}  // namespace
}  // namespace persia::serving

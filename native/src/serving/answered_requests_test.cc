// A log that is behind has bounds of its own, and does not bound what the port answers.
#include "serving/answered_requests.h"

#include <gtest/gtest.h>

#include "serving/front_test_util.h"
#include "serving/serving_test_util.h"

namespace persia::serving {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

std::shared_ptr<AnsweredRequests> LogOfAll(uint64_t max_bytes) {
  return std::make_shared<AnsweredRequests>(std::make_shared<Draw>("log", 1), max_bytes);
}

TEST(AnsweredRequestsTest, WhatWaitsHasABoundInBytes) {
  const auto log = LogOfAll(250);
  for (int i = 0; i < 5; ++i) {
    log->Offer(std::make_shared<Samples>(DecodeSamples(BytesOf(BatchOf({7}, {1}))).value()));
    log->Offer(std::vector<std::byte>(100));
  }
  const uint64_t num_dropped = log->num_dropped();
  EXPECT_GT(num_dropped, 4u);
  EXPECT_FALSE(log->HasRoom());
  EXPECT_EQ(log->num_dropped(), num_dropped + 1);
  log->Close();
  uint64_t num_kept = 0;
  while (log->Next().has_value()) ++num_kept;
  EXPECT_EQ(num_kept + num_dropped, 10u);
}

// IDs that repeat travel as a byte each, and wait as 8.
TEST(AnsweredRequestsTest, UnpackedIdsCountAsBytesThatWait) {
  constexpr uint64_t kNumIds = 1000;
  const auto batch = BatchOf(std::vector<uint64_t>(kNumIds, 1), std::vector<float>(kNumIds, 1));
  ASSERT_LT(batch.size(), kNumIds * sizeof(uint64_t));
  const auto log = LogOfAll(kNumIds * sizeof(uint64_t));
  log->Offer(std::make_shared<Samples>(DecodeSamples(BytesOf(batch)).value()));
  EXPECT_FALSE(log->HasRoom());
}

class LogTest : public FrontTest {};

TEST_F(LogTest, ALogThatHangsRefusesNoRequest) {
  FrontOptions options;
  const auto log = LogOfAll(1 << 20);
  options.grpc.max_held_bytes = 100'000;
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 10'000});
  Start(options, log);
  StartComputing();
  Client client(port_);
  const std::string request =
      RequestOf(BatchOf(std::vector<uint64_t>(2000, 7), std::vector<float>(2000, 1)));
  for (int i = 0; i < 20; ++i) {
    const auto answer = client.Call(kInfer, request);
    ASSERT_EQ(answer.status, "0") << i << ": " << answer.message;
  }
  EXPECT_EQ(log->num_dropped(), 0u);
}

}  // namespace
}  // namespace persia::serving

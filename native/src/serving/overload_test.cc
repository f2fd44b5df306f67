// Clients of an overloaded server send header fields first.
#include <gtest/gtest.h>

#include <thread>

#include "base/eventually_test_util.h"
#include "serving/front_test_util.h"
#include "serving/serving_test_util.h"

namespace persia::serving {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

class OverloadTest : public FrontTest {};

constexpr uint32_t kWide = 1 << 20;  // the window of a stream without overload

// Calls a server that refuses, until it lets the client send header fields alone.
bool IsRefusedUntilNarrow(Client* client, const std::string& request) {
  return Eventually([&] {
    std::vector<int32_t> many;
    for (int i = 0; i < 100; ++i) many.push_back(client->Begin(kInfer, request));
    for (const int32_t one : many) EXPECT_EQ(client->End(one).status, "8");
    return client->stream_window() < kWide;
  });
}

// Of an overloaded server clients learn that a call is refused before they send its message.
TEST_F(OverloadTest, MessagesOfRefusedCallsAreNotSent) {
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 10'000, .max_queued = 1});
  FrontOptions options = Patient();
  options.grpc.overload = std::chrono::hours(1);
  Start(options);
  Client client(port_);
  const std::string small = RequestOf(BatchOf({7}, {1}));
  const std::string large =
      RequestOf(BatchOf(std::vector<uint64_t>(4000, 7), std::vector<float>(4000, 1)));
  // The window of these changes while they are sent.
  const std::string half(30'000, 'x');
  const std::string begun = std::string("\0\0\0\xea\x60", 5) + half;  // of 60,000 bytes
  const int32_t whole = client.BeginAndStop("/a.B/C", begun);
  const CallId call = Await(CallEvent::Kind::kCall).call;
  const int32_t queued = client.Begin(kInfer, small);
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() == 1; }));
  ASSERT_TRUE(IsRefusedUntilNarrow(&client, small));
  const int32_t refused = client.Begin(kInfer, large);
  EXPECT_EQ(client.End(refused).status, "8");
  EXPECT_GT(client.unsent(refused), large.size() / 2);
  client.Continue(whole, half);
  EXPECT_EQ(Await(CallEvent::Kind::kMessage).message.bytes.size(), 2 * half.size());
  front_->Finish(call, GrpcCode::kOk, "");
  client.End(whole);
  // What is admitted is sent.
  StartComputing();
  EXPECT_EQ(client.End(queued).status, "0");
  EXPECT_LT(client.stream_window(), kWide);
  EXPECT_EQ(client.Call(kInfer, large).status, "0");
}

TEST_F(OverloadTest, AnOverloadEnds) {
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_queued = 1});
  Start(Patient());
  Client client(port_);
  const std::string request = RequestOf(BatchOf({7}, {1}));
  const int32_t queued = client.Begin(kInfer, request);
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() == 1; }));
  ASSERT_TRUE(IsRefusedUntilNarrow(&client, request));
  StartComputing();
  EXPECT_EQ(client.End(queued).status, "0");
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(client.Call(kInfer, request).status, "0");
    return client.stream_window() == kWide;
  }));
}

// The size of a request is known once it has arrived, and may be too large for its deadline.
TEST_F(OverloadTest, RefusalsOfWholeRequestsAreOverload) {
  FrontOptions options = Patient();
  options.grpc.overload = std::chrono::hours(1);
  Start(options);
  Client client(port_);
  const std::string small = RequestOf(BatchOf({7}, {1}));
  const std::string large =
      RequestOf(BatchOf(std::vector<uint64_t>(8, 7), std::vector<float>(8, 1)));
  const auto compute = [&](const std::string& request, std::chrono::milliseconds time) {
    const int32_t id = client.Begin(kInfer, request);
    const auto batch = queue_->Next();
    std::this_thread::sleep_for(time);
    batch->Answer({"m", "7", {}, {}});
    EXPECT_EQ(client.End(id).status, "0");
  };
  compute(large, std::chrono::seconds(1));
  compute(small, std::chrono::milliseconds(0));
  client.Begin(kInfer, small);
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() == 1; }));
  // One that is refused at its header fields narrows the window, but is too few for an overload.
  EXPECT_TRUE(Eventually([&] {
    std::vector<int32_t> many;
    for (int i = 0; i < 100; ++i) {
      many.push_back(client.Begin(kInfer, large, {{"grpc-timeout", "1S"}}));
    }
    many.push_back(client.Begin(kInfer, small, {{"grpc-timeout", "1m"}}));
    for (const int32_t one : many) client.End(one);
    return client.stream_window() < kWide;
  }));
}

}  // namespace
}  // namespace persia::serving

// The port for predictions as clients meet it, with a thread that computes in the place of
// Python's.
#include "serving/front.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/eventually_test_util.h"
#include "serving/front_test_util.h"
#include "serving/grpc_text.h"
#include "serving/serving_test_util.h"

namespace persia::serving {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

// The last bytes of a response are the values of its output.
float LastFloat(const std::string& body) {
  float value = 0;
  if (body.size() >= sizeof(value)) {
    std::memcpy(&value, body.data() + body.size() - sizeof(value), sizeof(value));
  }
  return value;
}

TEST_F(FrontTest, ManyClientsGetTheirOwnAnswers) {
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 8, .max_queued = 1000});
  Start();
  StartComputing();
  constexpr int kNumClients = 4;
  constexpr int kNumCalls = 50;
  std::vector<std::thread> clients;
  for (int i = 0; i < kNumClients; ++i) {
    clients.emplace_back([this, i] {
      Client client(port_);
      std::map<int32_t, float> expected;
      for (int call = 0; call < kNumCalls; ++call) {
        const auto age = static_cast<float>(1000 * i + call);
        expected[client.Begin(kInfer, RequestOf(BatchOf({7}, {age})))] = age;
      }
      for (const auto& [id, age] : expected) {
        const auto answer = client.End(id);
        EXPECT_EQ(answer.status, "0");
        EXPECT_EQ(LastFloat(answer.body), age);
      }
    });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(NumOf(GrpcCode::kOk), uint64_t{kNumClients} * kNumCalls);
}

TEST_F(FrontTest, AFullQueueRefusesAtOnce) {
  Start();
  Client client(port_);
  std::vector<int32_t> queued;
  for (int i = 0; i < 4; ++i) queued.push_back(client.Begin(kInfer, RequestOf(BatchOf({7}, {1}))));
  const auto refused = client.Call(kInfer, RequestOf(BatchOf({7}, {1})));
  EXPECT_EQ(refused.status, "8");
  EXPECT_NE(refused.message.find("4 requests wait already"), std::string::npos);
  StartComputing();
  for (const int32_t id : queued) EXPECT_EQ(client.End(id).status, "0");
}

TEST_F(FrontTest, EachModelHasAQueueOfItsOwn) {
  const auto queue = std::make_shared<RequestQueue>(QueueOptions{.max_queued = 1});
  const auto counts = std::make_shared<RequestCounts>("n");
  Start({}, {{.name = "m", .queue = queue_, .counts = counts_},
             {.name = "n", .queue = queue, .counts = counts}});
  ModelInputs inputs = Inputs();
  inputs.model_name = "n";
  front_->SetInputs(std::make_shared<ModelInputs>(inputs));
  StartComputing();
  Client client(port_);
  const int32_t first = client.Begin(kInfer, RequestOf(BatchOf({7}, {1}), "n"));
  ASSERT_TRUE(Eventually([&] { return queue->num_waiting() == 1; }));
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {2}), "n")).status, "8");
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {3}))).status, "0");
  queue->Next()->Answer({"n", "1", {}, {{"FP32", {1}, 0, {}}}});
  EXPECT_EQ(client.End(first).status, "0");
  EXPECT_EQ(counts->snapshot().by_code[static_cast<size_t>(GrpcCode::kResourceExhausted)], 1u);
  EXPECT_EQ(NumOf(GrpcCode::kOk), 1u);
}

TEST_F(FrontTest, ACallIsRefusedUnreadIfTheQueuesOfAllModelsAreFull) {
  const auto queue = std::make_shared<RequestQueue>(QueueOptions{.max_queued = 1});
  const auto counts = std::make_shared<RequestCounts>("of a model");
  Start({}, {{.name = "m", .queue = queue_, .counts = counts},
             {.name = "n", .queue = queue, .counts = counts}});
  ModelInputs inputs = Inputs();
  inputs.model_name = "n";
  front_->SetInputs(std::make_shared<ModelInputs>(inputs));
  Client client(port_);
  for (int i = 0; i < 4; ++i) client.Begin(kInfer, RequestOf(BatchOf({7}, {1})));
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() == 4; }));
  client.Begin(kInfer, RequestOf(BatchOf({7}, {1}), "n"));
  ASSERT_TRUE(Eventually([&] { return queue->num_waiting() == 1; }));
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {1}), "n")).status, "8");
  EXPECT_EQ(NumOf(GrpcCode::kResourceExhausted), 1u);
  EXPECT_EQ(counts->snapshot().by_code[static_cast<size_t>(GrpcCode::kResourceExhausted)], 0u);
}

TEST_F(FrontTest, WhoWaitsNoLongerIsNotComputed) {
  Start();
  Client client(port_);
  const auto late = client.Call(kInfer, RequestOf(BatchOf({7}, {1})), {{"grpc-timeout", "10m"}});
  EXPECT_EQ(late.status, "4");
  client.Cancel(client.Begin(kInfer, RequestOf(BatchOf({7}, {2}))));
  const int32_t kept = client.Begin(kInfer, RequestOf(BatchOf({7}, {3})));
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() == 3; }));
  ASSERT_TRUE(Eventually([&] { return NumOf(GrpcCode::kCancelled) > 0; }));
  const auto batch = queue_->Next();
  EXPECT_EQ(batch->num_requests(), 1u);
  batch->Fail(GrpcCode::kUnavailable, "no rows: 100 %\n");
  const auto answer = client.End(kept);
  EXPECT_EQ(answer.status, "14");
  EXPECT_EQ(answer.message, "no rows: 100 %25%0A");
  EXPECT_EQ(NumOf(GrpcCode::kDeadlineExceeded), 1u);
}

TEST_F(FrontTest, OtherCallsAreForPython) {
  Start();
  Client client(port_);
  const int32_t id = client.Begin("/a.B/C", "hello", {{"authorization", "Bearer x"}});
  const CallEvent begun = Await(CallEvent::Kind::kCall);
  EXPECT_EQ(begun.head.method, "/a.B/C");
  EXPECT_EQ(begun.head.authorization, "Bearer x");
  front_->Send(begun.call, "one");
  front_->Send(begun.call, std::string(100'000, 'x'));  // more than a frame, and than a window
  front_->Finish(begun.call, GrpcCode::kOk, "");
  const auto answer = client.End(id);
  EXPECT_EQ(answer.status, "0");
  EXPECT_EQ(answer.body.size(), 3 + 5 + 100'000u);
  // Another model, which Python refuses; its message goes with it.
  const int32_t other = client.Begin(kInfer, RequestOf(BatchOf({7}, {1}), "other"));
  CallEvent message = Await(CallEvent::Kind::kMessage);
  if (message.call == begun.call) message = Await(CallEvent::Kind::kMessage);
  EXPECT_EQ(Raw(message.message.bytes), RequestOf(BatchOf({7}, {1}), "other"));
  front_->Finish(message.call, static_cast<GrpcCode>(5), "there is no model");
  EXPECT_EQ(client.End(other).status, "5");
}

TEST_F(FrontTest, BoundsOfMessages) {
  FrontOptions options;
  options.grpc.max_message_bytes = 1000;
  options.grpc.max_calls = 2;
  Start(options);
  Client client(port_);
  EXPECT_EQ(client.Call(kInfer, std::string(1001, 'x')).status, "8");
  EXPECT_EQ(client.End(client.BeginWithBody(kInfer, std::string("\0\0\0\0\x09", 5))).status, "3");
  EXPECT_EQ(client.End(client.BeginWithBody(kInfer, std::string(12, '\0'))).status, "3");
  EXPECT_EQ(client.Call(kInfer, "", {{":method", "GET"}}).status, "415");
  EXPECT_EQ(client.Call(kInfer, "", {{"content-type", "text/html"}}).status, "415");
  client.Begin("/a.B/C", "");
  client.Begin("/a.B/C", "");
  EXPECT_EQ(client.Call("/a.B/C", "").status, "8");
}

TEST_F(FrontTest, OnlyTheTokenIsAnsweredWithoutPython) {
  FrontOptions options;
  // Of "secret".
  options.token_digest = {0x2b, 0xb8, 0x0d, 0x53, 0x7b, 0x1d, 0xa3, 0xe3, 0x8b, 0xd3, 0x03,
                          0x61, 0xaa, 0x85, 0x56, 0x86, 0xbd, 0xe0, 0xea, 0xcd, 0x71, 0x62,
                          0xfe, 0xf6, 0xa2, 0x5f, 0xe9, 0x7b, 0xf5, 0x27, 0xa2, 0x5b};
  Start(options);
  StartComputing();
  Client client(port_);
  const std::string request = RequestOf(BatchOf({7}, {1}));
  EXPECT_EQ(client.Call(kInfer, request, {{"authorization", "Bearer secret"}}).status, "0");
  for (const auto* wrong : {"Bearer secre", "Bearer ", "secret", ""}) {
    const int32_t id = client.Begin(kInfer, request, {{"authorization", wrong}});
    const CallEvent begun = Await(CallEvent::Kind::kCall);
    front_->Finish(begun.call, static_cast<GrpcCode>(16), "");
    EXPECT_EQ(client.End(id).status, "16");
  }
}

TEST_F(FrontTest, ABatchMayOutliveThePort) {
  Start();
  Client client(port_);
  const int32_t id = client.Begin(kInfer, RequestOf(BatchOf({7}, {5})));
  const auto batch = queue_->Next();
  front_.reset();
  EXPECT_EQ(client.End(id).status, "");
  batch->Answer({"m", "7", {}, {}});
  EXPECT_EQ(NumOf(GrpcCode::kCancelled), 1u);
}

TEST_F(FrontTest, StoppingAnswersWhatIsUnderWay) {
  Start();
  Client client(port_);
  const int32_t id = client.Begin(kInfer, RequestOf(BatchOf({7}, {5})));
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() > 0; }));
  std::thread stopping([this] { front_->Stop(std::chrono::seconds(120)); });
  StartComputing();
  EXPECT_EQ(client.End(id).status, "0");
  stopping.join();
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {5}))).status, "");
}

TEST(GrpcTextTest, Timeouts) {
  using std::chrono::nanoseconds;
  EXPECT_EQ(ReadTimeout("1n"), nanoseconds(1));
  EXPECT_EQ(ReadTimeout("2u"), nanoseconds(2000));
  EXPECT_EQ(ReadTimeout("200m"), std::chrono::milliseconds(200));
  EXPECT_EQ(ReadTimeout("3S"), std::chrono::seconds(3));
  EXPECT_EQ(ReadTimeout("4M"), std::chrono::minutes(4));
  EXPECT_EQ(ReadTimeout("99999999H"), std::chrono::hours(24 * 365));
  for (const auto* wrong : {"", "m", "1", "1x", "-1S", "+1S", "1.5S", "123456789S", " 1S", "1 S"}) {
    EXPECT_EQ(ReadTimeout(wrong), std::nullopt) << wrong;
  }
}

}  // namespace
}  // namespace persia::serving

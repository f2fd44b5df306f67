// Clients that send more than they should, or do not read: what the port holds for them has bounds,
// and the others are answered.
#include <gtest/gtest.h>
#include <netdb.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <thread>

#include "base/eventually_test_util.h"
#include "serving/front_test_util.h"
#include "serving/grpc_server.h"
#include "serving/serving_test_util.h"

namespace persia::serving {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

// Of 4,000 IDs that take 8 bytes each on the wire, too: 48 KB, and 80 KB with its unpacked IDs.
std::string LargeRequest() {
  std::vector<uint64_t> ids(4000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i << 50;
  return RequestOf(BatchOf(ids, std::vector<float>(ids.size(), 1)));
}

class BoundsTest : public FrontTest {
 protected:
  // Of a call for Python.
  CallId Begun() { return Await(CallEvent::Kind::kCall).call; }
};

constexpr int32_t kNoCall = 0;
const std::string kEmpty(5, '\0');  // a message without content

FrontOptions Impatient() {
  FrontOptions options;
  options.grpc.patience = std::chrono::milliseconds(200);
  return options;
}

// Waits until the server has closed the connection; with bytes that it has not read, it resets it.
bool IsClosed(int fd) {
  std::array<char, 4096> bytes;
  ssize_t size = 1;
  while (size > 0) size = ::recv(fd, bytes.data(), bytes.size(), 0);
  return size == 0 || errno == ECONNRESET;
}

TEST_F(BoundsTest, AClientThatDoesNotReadHoldsNoCall) {
  Start(Impatient());
  constexpr int32_t kLargest = 0x7fffffff;
  Client greedy(port_, {.settings = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kLargest}},
                        .window = kLargest,
                        .receive_buffer = 4096});
  greedy.Begin("/quiet", "");
  const CallId quiet = Begun();
  greedy.Begin("/a.B/C", "");
  const CallId large = Begun();
  front_->Send(large, std::string(32 << 20, 'x'));
  front_->Finish(large, GrpcCode::kOk, "");
  // Nothing is sent for this one: it ends with the connection.
  for (CallId closed = 0; closed != quiet;) closed = Await(CallEvent::Kind::kClosed).call;
}

TEST_F(BoundsTest, AnswersThatAreNotTakenEndTheirCall) {
  Start(Impatient());
  Client client(port_, {.settings = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0}}});
  const int32_t slow = client.Begin("/a.B/C", "");
  front_->Send(Begun(), "an answer");
  EXPECT_EQ(client.End(slow).error, uint32_t{NGHTTP2_CANCEL});
}

TEST_F(BoundsTest, AMessageThatStopsArrivingEndsItsCall) {
  Start(Impatient());
  Client client(port_);
  // The client's half stays open, as that of a call that may last.
  const int32_t half = client.BeginAndStop(kInfer, std::string("\0\0\0\x03\xe8"
                                                               "hello",
                                                               10));
  const auto answer = client.End(half);
  EXPECT_EQ(answer.status, "4");
  EXPECT_NE(answer.message.find("no byte of the message has come for 200 ms"), std::string::npos);
  EXPECT_EQ(NumOf(GrpcCode::kDeadlineExceeded), 1u);
  EXPECT_EQ(NumOf(GrpcCode::kCancelled), 0u);
}

// Its client sends a byte of a long message now and then.
TEST_F(BoundsTest, SendingIsNotTaking) {
  FrontOptions options;
  options.grpc.patience = std::chrono::seconds(1);
  Start(options);
  Client client(port_, {.settings = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0}}});
  const int32_t slow = client.BeginAndStop("/a.B/C", std::string("\0\1\0\0\0", 5));
  front_->Send(Begun(), "an answer");
  EXPECT_TRUE(Eventually([&] {
    client.Continue(slow, "x");
    const auto events = front_->TakeEvents();
    return std::any_of(events.begin(), events.end(),
                       [](const auto& event) { return event.kind == CallEvent::Kind::kClosed; });
  }));
  EXPECT_EQ(client.End(slow).error, uint32_t{NGHTTP2_CANCEL});
}

TEST_F(BoundsTest, BytesThatAreOnlyAnnouncedAreNotHeld) {
  FrontOptions options;
  options.grpc.max_held_bytes = 100'000;
  Start(options);
  StartComputing();
  Client client(port_);
  const std::string announced("\0\0\0\xea\x60", 5);  // 60,000 bytes
  for (int i = 0; i < 3; ++i) client.BeginAndStop("/a.B/C", announced);
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {1}))).status, "0");
  const int32_t large = client.BeginAndStop("/a.B/C", announced + std::string(59'000, 'x'));
  EXPECT_EQ(client.Call("/a.B/C", std::string(59'000, 'x')).status, "8");
  client.Cancel(large);
}

// Its client may keep the stream open for long.
TEST_F(BoundsTest, AnAnsweredCallHoldsNoHalfMessage) {
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 10'000});
  FrontOptions options = Patient();
  options.grpc.max_held_bytes = 100'000;
  Start(options);
  StartComputing();
  Client slow(port_, {.settings = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0}}});
  const std::string announced("\0\0\0\xea\x60", 5);  // 60,000 bytes
  slow.BeginAndStop("/a.B/C", announced + std::string(59'000, 'x'));
  const CallId half = Begun();
  const std::string request = LargeRequest();
  Client other(port_);
  ASSERT_TRUE(Eventually([&] { return other.Call(kInfer, request).status == "8"; }));
  front_->Send(half, "an answer that is not taken");
  front_->Finish(half, GrpcCode::kOk, "");
  EXPECT_TRUE(Eventually([&] { return other.Call(kInfer, request).status == "0"; }));
}

TEST_F(BoundsTest, FewAnswersWaitForAClientThatDoesNotTakeThem) {
  Start();
  Client client(port_, {.settings = {{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0}}});
  const int32_t many = client.Begin("/a.B/C", "");
  const CallId call = Begun();
  for (int i = 0; i < 5; ++i) front_->Send(call, std::string(1 << 19, 'x'));
  EXPECT_EQ(client.End(many).error, uint32_t{NGHTTP2_ENHANCE_YOUR_CALM});
  EXPECT_EQ(Await(CallEvent::Kind::kClosed).call, call);
}

TEST_F(BoundsTest, CallsThatPythonNeverSawLeaveNoEvents) {
  Start();
  StartComputing();
  Client client(port_);
  for (int i = 0; i < 2000; ++i) client.Cancel(client.Begin("/a.B/C", ""));
  // All of these were handled before this one.
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {1}))).status, "0");
  EXPECT_TRUE(front_->TakeEvents().empty());
  // Of one that it has seen, Python hears the end.
  const int32_t seen = client.Begin("/" + std::string(10'000, 'x'), "");
  const CallEvent begun = Await(CallEvent::Kind::kCall);
  EXPECT_LT(begun.head.method.size(), 1000u);
  client.Cancel(seen);
  EXPECT_EQ(Await(CallEvent::Kind::kClosed).call, begun.call);
}

TEST_F(BoundsTest, ACallHasFewMessages) {
  Start();
  Client client(port_);
  std::string messages;
  for (int i = 0; i < 300; ++i) messages += kEmpty;
  const auto answer = client.End(client.BeginWithBody("/a.B/C", messages));
  EXPECT_EQ(answer.status, "8");
  EXPECT_NE(answer.message.find("messages"), std::string::npos);
}

TEST_F(BoundsTest, RequestsThatWereGivenUpAreHeldUntilTheyLeaveTheQueue) {
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 10'000, .max_queued = 9});
  FrontOptions options;
  options.grpc.max_held_bytes = 100'000;
  Start(options);
  Client client(port_);
  const std::string small = RequestOf(BatchOf({7}, {1}));
  const std::string large = LargeRequest();
  const int32_t given_up = client.Begin(kInfer, large);
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() > 0; }));
  client.Cancel(given_up);
  ASSERT_TRUE(Eventually([&] { return NumOf(GrpcCode::kCancelled) > 0; }));
  EXPECT_EQ(client.Call(kInfer, large).status, "8");
  StartComputing();
  EXPECT_EQ(client.Call(kInfer, small).status, "0");
  EXPECT_EQ(client.Call(kInfer, large).status, "0");
}

TEST_F(BoundsTest, UnpackedIdsCountAsHeldBytes) {
  queue_ = std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 10'000, .max_queued = 9});
  FrontOptions options;
  options.grpc.max_held_bytes = 60'000;
  Start(options);
  Client client(port_);
  // 5 bytes of an ID and its age, and 8 of an ID that is unpacked.
  const std::string request =
      RequestOf(BatchOf(std::vector<uint64_t>(4000, 7), std::vector<float>(4000, 1)));
  ASSERT_LT(2 * request.size(), options.grpc.max_held_bytes);
  const int32_t first = client.Begin(kInfer, request);
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() > 0; }));
  EXPECT_EQ(client.Call(kInfer, request).status, "8");
  StartComputing();
  EXPECT_EQ(client.End(first).status, "0");
  EXPECT_EQ(client.Call(kInfer, request).status, "0");
}

TEST_F(BoundsTest, ConnectionsWithoutCallsMakeRoom) {
  FrontOptions options;
  options.grpc.max_connections = 2;
  ::testing::internal::CaptureStderr();
  Start(options);
  StartComputing();
  const std::string request = RequestOf(BatchOf({7}, {1}));
  Client first(port_);
  EXPECT_EQ(first.Call(kInfer, request).status, "0");
  for (int i = 0; i < 3; ++i) {
    const auto idle = Connect(port_);
    EXPECT_EQ(::send(idle.get(), "P", 1, MSG_NOSIGNAL), 1);
    // The next one is accepted after it, and takes its room.
    const auto next = Connect(port_);
    EXPECT_TRUE(IsClosed(idle.get()));
    Client other(port_);
    EXPECT_EQ(other.Call(kInfer, request).status, "0");
    EXPECT_EQ(first.Call(kInfer, request).status, "0");
  }
  // It is not the limit of open files.
  const std::string warned = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warned.find("clients share connections, or run more servers"), std::string::npos);
}

// Clients that connect at the same time do not close each other's connections, and strangers do not
// close all that are in use.
TEST_F(BoundsTest, NewConnectionsHaveAShare) {
  FrontOptions options = Patient();
  options.grpc.max_connections = 10;
  Start(options);
  StartComputing();
  const std::string request = RequestOf(BatchOf({7}, {1}));
  std::vector<std::unique_ptr<Client>> unused;
  for (int i = 0; i < 10; ++i) {
    unused.push_back(std::make_unique<Client>(port_));
    EXPECT_EQ(unused.back()->Call(kInfer, request).status, "0");
  }
  std::vector<net::UniqueFd> sockets;
  for (int i = 0; i < 5; ++i) sockets.push_back(Connect(port_));
  EXPECT_FALSE(unused[4]->End(kNoCall).is_closed);  // until the server has hung up
  std::vector<std::unique_ptr<Client>> clients;
  for (auto& socket : sockets) {
    clients.push_back(std::make_unique<Client>(std::move(socket), Client::Options()));
  }
  for (const auto& client : clients) EXPECT_EQ(client->Call(kInfer, request).status, "0");
  std::vector<net::UniqueFd> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(Connect(port_));
  EXPECT_TRUE(IsClosed(strangers[14].get()));
  for (const auto& client : clients) EXPECT_EQ(client->Call(kInfer, request).status, "0");
}

// The process's limit of descriptors; the old one at the end of the block.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(int limit) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit changed = before_;
    changed.rlim_cur = static_cast<rlim_t>(limit);
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &changed), 0);
  }
  DescriptorLimit(const DescriptorLimit&) = delete;
  ~DescriptorLimit() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_ = {};
};

TEST_F(BoundsTest, WithoutDescriptorsConnectionsWithoutCallsMakeRoom) {
  Start(Patient());
  StartComputing();
  std::vector<net::UniqueFd> idle(40);
  for (auto& one : idle) one = NewSocket();
  net::UniqueFd last = NewSocket();
  const DescriptorLimit eight_more(last.get() + 9);
  for (auto& one : idle) one = Connected(std::move(one), port_);
  Client client(Connected(std::move(last), port_), {});
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {1}))).status, "0");
}

TEST_F(BoundsTest, AsManyConnectionsAreOpenAsDescriptorsPermit) {
  const size_t half = static_cast<size_t>(NewSocket().get()) + 20;
  {
    const DescriptorLimit limit(static_cast<int>(2 * half));  // the other half is for files
    Start(Patient());
  }
  std::vector<net::UniqueFd> idle;
  for (size_t i = 0; i <= half; ++i) idle.push_back(Connect(port_));
  EXPECT_TRUE(IsClosed(idle.front().get()));
  StartComputing();
  Client client(port_);
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {1}))).status, "0");
}

TEST_F(BoundsTest, AConnectionThatBeginsNoCallIsClosed) {
  Start(Impatient());
  const auto idle = Connect(port_);
  EXPECT_EQ(::send(idle.get(), "P", 1, MSG_NOSIGNAL), 1);
  EXPECT_TRUE(IsClosed(idle.get()));
}

// As many as may be open are kept by the library after they were closed.
TEST_F(BoundsTest, AConnectionHasFewStreams) {
  FrontOptions options;
  options.grpc.max_calls = 300;
  Start(options);
  StartComputing();
  Client client(port_);
  EXPECT_EQ(client.Call(kInfer, RequestOf(BatchOf({7}, {1}))).status, "0");
  EXPECT_EQ(client.max_streams(), 600u);
}

TEST_F(BoundsTest, TooManyTensorsAreRefusedWithoutPython) {
  Start();
  Client client(port_);
  std::string request = RequestOf(BatchOf({7}, {1}));
  for (int i = 0; i < 5000; ++i) ProtoWriter(&request).Bytes(5, "");
  EXPECT_EQ(client.Call(kInfer, request).status, "3");
  EXPECT_EQ(NumOf(GrpcCode::kInvalidArgument), 1u);
  // So are those for a model that the server does not have, or whose end cannot be read.
  std::string unknown = RequestOf(BatchOf({7}, {1}), "other");
  for (int i = 0; i < 5000; ++i) ProtoWriter(&unknown).Bytes(5, "");
  EXPECT_EQ(client.Call(kInfer, unknown).status, "3");
  EXPECT_EQ(client.Call(kInfer, request + '\x0f').status, "3");
  // And those that are for Python otherwise: its first output is not plain.
  std::string unusual;
  ProtoWriter(&unusual).Bytes(6, std::string("\x08\x01", 2));
  EXPECT_EQ(client.Call(kInfer, unusual + request).status, "3");
  EXPECT_EQ(NumOf(GrpcCode::kInvalidArgument), 4u);
}

TEST_F(BoundsTest, WhatTheServerRefusesIsCountedSo) {
  FrontOptions options;
  options.grpc.max_message_bytes = 1000;
  Start(options);
  Client client(port_);
  EXPECT_EQ(client.Call(kInfer, std::string(1001, 'x')).status, "8");
  EXPECT_EQ(client.End(client.BeginWithBody(kInfer, "abc")).status, "3");
  EXPECT_EQ(
      client.End(client.BeginWithBody(kInfer, "\x01" + kEmpty.substr(1), {{"grpc-encoding", "br"}}))
          .status,
      "12");
  EXPECT_EQ(client.Call(kInfer, "", {{"x", std::string(17'000, 'x')}}).status, "8");
  EXPECT_EQ(NumOf(GrpcCode::kResourceExhausted), 1u);
  EXPECT_EQ(NumOf(GrpcCode::kInvalidArgument), 1u);
  EXPECT_EQ(NumOf(GrpcCode::kUnimplemented), 1u);
  EXPECT_EQ(NumOf(GrpcCode::kCancelled), 0u);
}

// Python chooses the queue, which need not be the one that is full.
TEST_F(BoundsTest, WithoutInputsAFullQueueRefusesNothing) {
  Start({}, {{.name = "m", .queue = queue_, .counts = counts_},
             {.name = "n", .queue = queue_, .counts = counts_}});
  Client client(port_);
  for (int i = 0; i < 4; ++i) client.Begin(kInfer, RequestOf(BatchOf({7}, {1})));
  ASSERT_TRUE(Eventually([&] { return queue_->num_waiting() == 4; }));
  const int32_t id = client.Begin(kInfer, RequestOf(BatchOf({7}, {1}), "n"));
  front_->Finish(Begun(), GrpcCode::kOk, "");
  EXPECT_EQ(client.End(id).status, "0");
}

// Refuses all calls, the second time that a client calls only once it may.
class Refuser : public CallHandler {
 public:
  CallVerdict OnCall(CallId, const CallHead& head) override {
    if (head.method == "/wait") {
      is_waiting = true;
      EXPECT_TRUE(Eventually([&] { return may_continue.load(); }));
    }
    rusage usage = {};
    ::getrusage(RUSAGE_THREAD, &usage);
    num_sleeps.push_back(usage.ru_nvcsw);
    return {.code = GrpcCode::kResourceExhausted};
  }
  void OnMessage(CallId, GrpcMessage) override {}
  void OnEnd(CallId) override {}
  void OnLate(CallId) override {}
  void OnRefused(CallId, GrpcCode) override {}
  void OnClosed(CallId) override {}

  std::atomic<bool> is_waiting = false;
  std::atomic<bool> may_continue = false;
  std::vector<long> num_sleeps;  // of the server's thread, at each call
};

TEST(GrpcServerTest, CallsOfManyConnectionsAreRefusedAtOnce) {
  constexpr size_t kNumClients = 40;
  Refuser refuser;
  GrpcServer server({}, &refuser);
  const uint16_t port = server.Start("127.0.0.1", 0).value();
  std::vector<std::unique_ptr<Client>> clients;
  for (size_t i = 0; i < kNumClients; ++i) {
    clients.push_back(std::make_unique<Client>(port));
    EXPECT_EQ(clients.back()->Call("/now", "").status, "8");
  }
  std::vector<int32_t> calls = {clients[0]->Begin("/wait", "")};
  ASSERT_TRUE(Eventually([&] { return refuser.is_waiting.load(); }));
  for (size_t i = 1; i < kNumClients; ++i) calls.push_back(clients[i]->Begin("/now", ""));
  refuser.may_continue = true;
  for (size_t i = 0; i < kNumClients; ++i) EXPECT_EQ(clients[i]->End(calls[i]).status, "8");
  server.Stop(std::chrono::seconds(1));
  ASSERT_EQ(refuser.num_sleeps.size(), 2 * kNumClients);
  EXPECT_LT(refuser.num_sleeps.back() - refuser.num_sleeps[kNumClients], long{kNumClients} / 2);
}

TEST(GrpcServerTest, ListensOnEachAddressOfAName) {
  Refuser refuser;
  GrpcServer server({}, &refuser);
  const uint16_t port = server.Start("localhost", 0).value();
  addrinfo wanted = {};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  ASSERT_EQ(::getaddrinfo("localhost", std::to_string(port).c_str(), &wanted, &found), 0);
  int num_usable = 0;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    // Whether the machine has that address.
    const net::UniqueFd other(::socket(one->ai_family, SOCK_STREAM, 0));
    sockaddr_storage any = {};
    std::memcpy(&any, one->ai_addr, one->ai_addrlen);
    reinterpret_cast<sockaddr_in*>(&any)->sin_port = 0;  // at the same place for IPv6
    if (::bind(other.get(), reinterpret_cast<sockaddr*>(&any), one->ai_addrlen) != 0) continue;
    EXPECT_EQ(::connect(other.get(), one->ai_addr, one->ai_addrlen), 0) << one->ai_family;
    ++num_usable;
  }
  ::freeaddrinfo(found);
  EXPECT_GT(num_usable, 0);
}

}  // namespace
}  // namespace persia::serving

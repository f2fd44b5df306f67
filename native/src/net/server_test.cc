#include "net/server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <thread>

#include "net/channel.h"
#include "net/test_support.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

// A door that handlers wait behind.
class Gate {
 public:
  void Open() { promise_.set_value(); }
  bool Wait() const {
    return opened_.wait_for(std::chrono::seconds(120)) == std::future_status::ready;
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_{promise_.get_future().share()};
};

class ServerTest : public ::testing::Test {
 protected:
  void StartServer(Server::Options options = {}) {
    server_ = std::make_unique<Server>(options);
    server_->Handle(kEcho, Echo);
    server_->Handle(kBlock, [this](const Buffer&, const CallContext&) {
      ++num_blocked_;
      EXPECT_TRUE(gate_.Wait());
      return StatusOr<Segments>(Segments());
    });
    server_->Handle(kRefuse, [](const Buffer&, const CallContext&) {
      return StatusOr<Segments>(NotFound("nothing here"));
    });
    auto port = server_->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    port_ = *port;
  }
  uint64_t Value(std::string_view key) const {
    Metrics metrics;
    server_->AddMetrics(&metrics);
    return metrics[key];
  }
  void WaitForBlocked(int count) {
    const auto deadline = Soon();
    while (num_blocked_ < count && Clock::now() < deadline) std::this_thread::yield();
    ASSERT_EQ(num_blocked_, count);
  }
  static FrameHeader Request(const MethodId& method, uint64_t id, uint64_t body_bytes = 0) {
    FrameHeader header;
    header.method = method.number;
    header.request_id = id;
    header.deadline_ms = 30'000;
    header.body_bytes = body_bytes;
    return header;
  }
  // The connection still works: an echo comes back.
  static void ExpectAlive(RawClient& client) {
    FrameHeader reply;
    std::string body;
    client.SendFrame(Request(kEcho, 99, 5), Pattern(5));
    ASSERT_TRUE(client.Receive(&reply, &body));
    EXPECT_EQ(reply.request_id, 99u);
    EXPECT_EQ(reply.status, 0);
    EXPECT_EQ(body.size(), 5u);
  }

  Gate gate_;
  std::atomic<int> num_blocked_{0};
  std::unique_ptr<Server> server_;
  uint16_t port_ = 0;
};

TEST_F(ServerTest, UnknownVersionIsRefusedAndTheConnectionSurvives) {
  StartServer();
  RawClient client(port_);
  FrameHeader header = Request(kEcho, 7, 200'000);
  header.version = kVersion + 1;
  client.SendFrame(header, Pattern(200'000));
  FrameHeader reply;
  std::string body;
  ASSERT_TRUE(client.Receive(&reply, &body));
  EXPECT_EQ(reply.request_id, 7u);
  EXPECT_EQ(static_cast<StatusCode>(reply.status), StatusCode::kInvalidArgument);
  EXPECT_NE(body.find("version " + std::to_string(kVersion + 1)), std::string::npos) << body;
  ExpectAlive(client);
}

TEST_F(ServerTest, UnknownMethodIsRefusedAndTheConnectionSurvives) {
  StartServer();
  RawClient client(port_);
  for (const uint64_t size : {0, 1, 65536, 300'000}) {
    client.SendFrame(Request({250, ""}, size, size), Pattern(size));
    FrameHeader reply;
    std::string body;
    ASSERT_TRUE(client.Receive(&reply, &body));
    EXPECT_EQ(reply.request_id, size);
    EXPECT_EQ(static_cast<StatusCode>(reply.status), StatusCode::kInvalidArgument);
    EXPECT_NE(body.find("method 250"), std::string::npos) << body;
  }
  ExpectAlive(client);
}

TEST_F(ServerTest, GarbageAndOversizedBodiesCloseOnlyTheirConnection) {
  Server::Options options;
  options.max_body_bytes = 1000;
  StartServer(options);
  RawClient garbage(port_);
  garbage.Send(Pattern(500));
  EXPECT_TRUE(garbage.ClosedByServer());
  RawClient oversized(port_);
  oversized.SendFrame(Request(kEcho, 1, 1001));
  EXPECT_TRUE(oversized.ClosedByServer());
  RawClient reply_to_server(port_);
  FrameHeader header = Request(kEcho, 1);
  header.kind = FrameKind::kReply;
  reply_to_server.SendFrame(header);
  EXPECT_TRUE(reply_to_server.ClosedByServer());
  RawClient good(port_);
  ExpectAlive(good);
}

TEST_F(ServerTest, RequestPastItsDeadlineIsNotRun) {
  StartServer();
  RawClient client(port_);
  FrameHeader header = Request(kBlock, 1);
  header.deadline_ms = 0;
  client.SendFrame(header);
  FrameHeader reply;
  std::string body;
  ASSERT_TRUE(client.Receive(&reply, &body));
  EXPECT_EQ(static_cast<StatusCode>(reply.status), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(num_blocked_, 0);
  EXPECT_EQ(Value("rpc_num_late"), 1u);
  EXPECT_EQ(Value("rpc_num_failed"), 1u);
}

TEST_F(ServerTest, FastRequestOvertakesSlowOneOfItsConnection) {
  StartServer();
  RawClient client(port_);
  client.SendFrame(Request(kBlock, 1));
  WaitForBlocked(1);
  ExpectAlive(client);
  gate_.Open();
  FrameHeader reply;
  std::string body;
  ASSERT_TRUE(client.Receive(&reply, &body));
  EXPECT_EQ(reply.request_id, 1u);
}

TEST_F(ServerTest, TimeInLineIsMeasuredOfRequestsThatWait) {
  Server::Options options;
  options.num_handler_threads = 1;
  StartServer(options);
  const DurationStats& queue = *server_->durations().front();
  ASSERT_EQ(queue.name(), "queue of requests");
  RawClient client(port_);
  client.SendFrame(Request(kBlock, 1));
  WaitForBlocked(1);
  client.SendFrame(Request(kEcho, 2));
  const auto deadline = Soon();
  while (Value("rpc_num_in_line") < 1 && Clock::now() < deadline) std::this_thread::yield();
  gate_.Open();
  for (int replies = 0; replies < 2; ++replies) {
    FrameHeader reply;
    std::string body;
    ASSERT_TRUE(client.Receive(&reply, &body));
  }
  const DurationStats::Snapshot waited = queue.snapshot();
  EXPECT_EQ(std::accumulate(waited.counts.begin(), waited.counts.end(), uint64_t{0}), 1u);
  EXPECT_GT(waited.sum_ns, 0u);
}

TEST_F(ServerTest, InflightLimitDelaysButDropsNothing) {
  Server::Options options;
  options.max_inflight_bytes = 3000;
  options.num_io_threads = 2;
  StartServer(options);
  constexpr int kClients = 4;
  constexpr uint64_t kRequests = 50;
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([this] {
      RawClient client(port_);
      for (uint64_t id = 1; id <= kRequests; ++id) {
        client.SendFrame(Request(kEcho, id, 2000), Pattern(2000));
      }
      uint64_t ids = 0;
      for (uint64_t n = 0; n < kRequests; ++n) {
        FrameHeader reply;
        std::string body;
        ASSERT_TRUE(client.Receive(&reply, &body));
        ids += reply.request_id;
      }
      EXPECT_EQ(ids, kRequests * (kRequests + 1) / 2);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(ServerTest, BodyThatNeverComesGivesItsShareBack) {
  Server::Options options;
  options.max_inflight_bytes = 1000;
  StartServer(options);
  RawClient stalled(port_);
  FrameHeader header = Request(kEcho, 1, 1000);
  header.deadline_ms = 1;
  stalled.SendFrame(header, Pattern(10));
  RawClient other(port_);
  ExpectAlive(other);
  EXPECT_TRUE(stalled.ClosedByServer());
  ExpectAlive(other);
}

// A header takes nothing that others need, however large the body that it announces.
TEST_F(ServerTest, AnnouncedBodiesBlockNobody) {
  Server::Options options;
  options.max_body_bytes = 1 << 20;
  options.max_inflight_bytes = 4 << 20;
  StartServer(options);
  std::vector<std::unique_ptr<RawClient>> silent;
  for (uint64_t id = 0; id < 8; ++id) {
    silent.push_back(std::make_unique<RawClient>(port_));
    silent.back()->SendFrame(Request(kEcho, id, 1 << 20));
  }
  for (uint64_t id = 0; id < silent.size(); ++id) {
    RawClient other(port_);
    ExpectAlive(other);
  }
}

TEST_F(ServerTest, ABodyThatMakesNoProgressIsClosedWhateverItsDeadline) {
  Server::Options options;
  options.body_patience = std::chrono::milliseconds(20);
  StartServer(options);
  for (const uint64_t num_sent : {0, 10, 300'000}) {
    RawClient stalled(port_);
    FrameHeader header = Request(kEcho, 1, 1 << 20);
    header.deadline_ms = UINT32_MAX;
    stalled.SendFrame(header, Pattern(num_sent));
    EXPECT_TRUE(stalled.ClosedByServer()) << num_sent;
  }
}

// Each takes a part of the budget and needs more than is left.
TEST_F(ServerTest, LargeBodiesAtOnceDoNotBlockOneAnother) {
  Server::Options options;
  options.max_inflight_bytes = 1 << 20;
  options.num_io_threads = 2;
  StartServer(options);
  const auto body = Pattern(3 << 20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      RawClient client(port_);
      for (uint64_t id = 1; id <= 5; ++id) {
        client.SendFrame(Request(kEcho, id, body.size()), body);
        FrameHeader reply;
        std::string echoed;
        ASSERT_TRUE(client.Receive(&reply, &echoed));
        EXPECT_EQ(reply.request_id, id);
        EXPECT_EQ(std::memcmp(echoed.data(), body.data(), body.size()), 0);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(ServerTest, StopWhileABodyWaitsForTheBudget) {
  Server::Options options;
  options.max_inflight_bytes = 1000;
  StartServer(options);
  RawClient busy(port_);
  busy.SendFrame(Request(kBlock, 1, 1000), Pattern(1000));
  WaitForBlocked(1);
  RawClient waiting(port_);
  waiting.SendFrame(Request(kEcho, 2, 900), Pattern(900));
  std::thread stopper([this] { server_->Stop(std::chrono::seconds(30)); });
  EXPECT_TRUE(waiting.ClosedByServer());
  gate_.Open();
  FrameHeader reply;
  std::string body;
  EXPECT_TRUE(busy.Receive(&reply, &body));
  stopper.join();
}

TEST_F(ServerTest, ClientThatDoesNotReadHoldsUpOnlyItself) {
  StartServer();
  RawClient client(port_);
  constexpr int kRequests = 20;
  const auto body = Pattern(8 << 20);
  std::atomic<int> num_sent{0};
  std::thread sender([&] {
    for (uint64_t id = 0; id < kRequests; ++id, ++num_sent) {
      client.SendFrame(Request(kEcho, id, body.size()), body);
    }
  });
  // 160 MiB of replies that nobody takes: the server stops reading, and
  // the sender gets stuck. (A server that reads on is caught only if it
  // does so within the pauses; one that does not is never accused.)
  for (int seen = -1; seen != num_sent;) {
    seen = num_sent;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_LT(num_sent, kRequests);
  RawClient other(port_);
  ExpectAlive(other);
  for (int i = 0; i < kRequests; ++i) {
    FrameHeader reply;
    std::string echoed;
    ASSERT_TRUE(client.Receive(&reply, &echoed));
    EXPECT_EQ(echoed.size(), body.size());
  }
  sender.join();
}

TEST_F(ServerTest, StopLetsRunningHandlersAnswer) {
  StartServer();
  RawClient client(port_);
  client.SendFrame(Request(kBlock, 5));
  WaitForBlocked(1);
  std::thread stopper([this] { server_->Stop(std::chrono::seconds(30)); });
  gate_.Open();
  FrameHeader reply;
  std::string body;
  EXPECT_TRUE(client.Receive(&reply, &body));
  EXPECT_EQ(reply.request_id, 5u);
  EXPECT_EQ(reply.status, 0);
  stopper.join();
  server_->Stop();  // again: nothing
  RawClient late(port_);
  EXPECT_FALSE(late.connected());
}

TEST_F(ServerTest, StopReturnsAtItsTimeoutThoughAHandlerRuns) {
  StartServer();
  RawClient client(port_);
  client.SendFrame(Request(kBlock, 5));
  WaitForBlocked(1);
  server_->Stop(std::chrono::milliseconds(50));
  EXPECT_TRUE(client.ClosedByServer());
  gate_.Open();  // or the destructor would wait for the handler
  server_.reset();
}

TEST_F(ServerTest, EndsWithRequestsWhoseTurnNeverCame) {
  StartServer({.num_handler_threads = 1});
  RawClient client(port_);
  for (uint64_t id = 0; id < 100; ++id) client.SendFrame(Request(kBlock, id));
  WaitForBlocked(1);
  server_->Stop(std::chrono::milliseconds(50));
  // The destructor waits for the handler that runs and drops the requests behind it, which
  // AddressSanitizer watches: they own connections, whose sockets must not outlive their service.
  std::thread opener([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    gate_.Open();
  });
  server_.reset();
  opener.join();
}

TEST_F(ServerTest, StopWithIdleAndHalfSentConnections) {
  StartServer();
  RawClient idle(port_);
  ExpectAlive(idle);
  RawClient half_header(port_);
  half_header.Send(Pattern(10));
  RawClient half_body(port_);
  half_body.SendFrame(Request(kEcho, 1, 1000), Pattern(10));
  server_->Stop(std::chrono::seconds(30));
  EXPECT_TRUE(idle.ClosedByServer());
  EXPECT_TRUE(half_header.ClosedByServer());
  EXPECT_TRUE(half_body.ClosedByServer());
}

TEST_F(ServerTest, TakenPortIsAnErrorThatNamesIt) {
  StartServer();
  Server second(Server::Options{});
  const Status status = second.Start("127.0.0.1", port_).status();
  EXPECT_EQ(status.code(), StatusCode::kIOError);
  EXPECT_NE(status.message().find(Loopback(port_)), std::string::npos) << status.message();
}

TEST_F(ServerTest, NeverStartedServerEnds) {
  Server server(Server::Options{});
  server.Stop();
}

TEST_F(ServerTest, ReplyAboveTheLimitIsATypedError) {
  Server::Options options;
  options.max_body_bytes = 100;
  server_ = std::make_unique<Server>(options);
  server_->Handle(kEcho, [](const Buffer&, const CallContext&) {
    Segments segments;
    segments.AddOwned(Pattern(101));
    return StatusOr<Segments>(std::move(segments));
  });
  auto port = server_->Start();
  ASSERT_TRUE(port.ok());
  RawClient client(*port);
  client.SendFrame(Request(kEcho, 1));
  FrameHeader reply;
  std::string body;
  ASSERT_TRUE(client.Receive(&reply, &body));
  EXPECT_EQ(static_cast<StatusCode>(reply.status), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace persia::net

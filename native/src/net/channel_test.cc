#include "net/channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/trace_buffer.h"
#include "net/test_support.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

using Result = StatusOr<Buffer>;

std::unique_ptr<Server> EchoServer(uint16_t* port, Server::Options options = {},
                                   uint16_t wanted_port = 0) {
  auto server = std::make_unique<Server>(options);
  server->Handle(kEcho, Echo);
  auto started = server->Start("127.0.0.1", wanted_port);
  EXPECT_TRUE(started.ok()) << started.status().ToString();
  *port = started.ok() ? *started : 0;
  return server;
}

std::future<Result> Async(Channel& channel, Segments segments, Clock::time_point deadline) {
  auto promise = std::make_shared<std::promise<Result>>();
  auto future = promise->get_future();
  channel.CallAsync(kEcho, std::move(segments), deadline,
                    [promise](Result result) { promise->set_value(std::move(result)); });
  return future;
}

TEST(ChannelTest, EchoesBodiesOfAllSizes) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  for (const size_t size : {0, 1, 7, 64, 4095, 4096, 65537, 1 << 20, 8 << 20}) {
    const auto body = Pattern(size, size);
    auto reply = channel.Call(kEcho, SegmentsOf(body), Soon());
    ASSERT_TRUE(reply.ok()) << size << ": " << reply.status().ToString();
    EXPECT_TRUE(SameBytes(*reply, body)) << size;
  }
}

TEST(ChannelTest, ManyPartsArriveInOrder) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  const auto body = Pattern(3000);
  Segments segments;  // more segments than one system call takes, with empty ones among them
  for (size_t i = 0; i < body.size(); i += 2) {
    segments.AddView(std::span(body).subspan(i, 2));
    segments.AddView({});
  }
  auto reply = channel.Call(kEcho, segments, Soon());
  ASSERT_TRUE(reply.ok());
  EXPECT_TRUE(SameBytes(*reply, body));
}

TEST(ChannelTest, PipelinedCallsAllReturnTheirOwnAnswer) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  std::vector<std::vector<std::byte>> bodies;
  std::vector<std::future<Result>> replies;
  for (uint32_t i = 0; i < 2000; ++i) bodies.push_back(Pattern(i % 700, i));
  for (const auto& body : bodies) replies.push_back(Async(channel, SegmentsOf(body), Soon()));
  for (size_t i = 0; i < bodies.size(); ++i) {
    auto reply = replies[i].get();
    ASSERT_TRUE(reply.ok()) << reply.status().ToString();
    EXPECT_TRUE(SameBytes(*reply, bodies[i])) << i;
  }
}

TEST(ChannelTest, ManyThreadsShareAChannel) {
  uint16_t port = 0;
  Server::Options options;
  options.num_io_threads = 2;
  auto server = EchoServer(&port, options);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  std::atomic<int> num_good{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < 50; ++i) {
        const auto body = Pattern(1000 * t + i, t);
        auto reply = channel.Call(kEcho, SegmentsOf(body), Soon());
        if (reply.ok() && SameBytes(*reply, body)) ++num_good;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(num_good, 8 * 50);
}

TEST(ChannelTest, CallbacksKeepToTheChannelsThreadWhileCallersLead) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  std::mutex mutex;
  std::set<std::thread::id> callback_threads;
  std::set<std::thread::id> caller_threads;
  std::atomic<int> num_good{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < 100; ++i) {
        const auto body = Pattern(100 * t + i, t);
        std::promise<void> answered;
        if (i % 5 == t) {
          channel.CallAsync(kEcho, SegmentsOf(body), Soon(), [&](const Result& reply) {
            if (reply.ok()) ++num_good;
            const std::lock_guard lock(mutex);
            callback_threads.insert(std::this_thread::get_id());
            answered.set_value();
          });
        }
        auto reply = channel.Call(kEcho, SegmentsOf(body), Soon());
        if (reply.ok() && SameBytes(*reply, body)) ++num_good;
        if (i % 5 == t) answered.get_future().wait();
      }
      const std::lock_guard lock(mutex);
      caller_threads.insert(std::this_thread::get_id());
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(num_good, 4 * 100 + 4 * 20);
  EXPECT_EQ(callback_threads.size(), 1u);
  EXPECT_FALSE(caller_threads.contains(*callback_threads.begin()));
}

TEST(ChannelTest, TheCallersBatchReachesHandlerAndSpans) {
  Server server({});
  std::mutex mutex;
  std::vector<uint32_t> tags;
  server.Handle(kEcho, [&](const Buffer&, const CallContext&) {
    const std::lock_guard lock(mutex);
    tags.push_back(TracedBatch::tag());
    return StatusOr<Segments>(Segments());
  });
  auto port = server.Start();
  ASSERT_TRUE(port.ok());
  Channel channel({.peer = "peer"});
  channel.SetAddress(Loopback(*port));
  TraceBuffer::Global().Start(100);
  {
    const TracedBatch outer(TracedBatch::TagOf(41));
    ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
    {
      const TracedBatch inner(TracedBatch::TagOf(0));
      ASSERT_TRUE(Async(channel, {}, Soon()).get().ok());
    }
    ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  }
  ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  server.Stop();  // the spans of its handlers are complete
  EXPECT_EQ(tags, (std::vector<uint32_t>{42, 1, 42, TracedBatch::kNone}));
  std::map<std::string, std::vector<uint64_t>> batches;
  for (const TraceSpan& span : TraceBuffer::Global().Stop().spans) {
    batches[span.name.data()].push_back(span.batch_id);
  }
  const std::vector<uint64_t> expected{41, 0, 41, TraceSpan::kNoBatch};
  EXPECT_EQ(batches["handle Echo"], expected);
  EXPECT_EQ(batches["rpc to peer"], expected);
}

TEST(ChannelTest, IdleChannelNoticesThatThePeerHasGone) {
  asio::io_context io;
  Tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  Channel channel({.peer = "leaving"});
  channel.SetAddress(Loopback(acceptor.local_endpoint().port()));
  std::thread peer([&] {
    Tcp::socket socket = acceptor.accept();
    FrameHeader header;
    header.kind = FrameKind::kReply;
    header.request_id = 1;
    std::array<std::byte, kHeaderBytes> bytes;
    EncodeHeader(header, bytes);
    std::array<std::byte, kHeaderBytes> request;
    asio::read(socket, asio::buffer(request));
    asio::write(socket, asio::buffer(bytes));
    socket.shutdown(Tcp::socket::shutdown_send);
    const timeval timeout{30, 0};
    ::setsockopt(socket.native_handle(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    ErrorCode error;
    std::byte byte;
    asio::read(socket, asio::buffer(&byte, 1), error);
    EXPECT_EQ(error, asio::error::eof);  // the channel, which nobody calls, has closed its end
  });
  EXPECT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  peer.join();
}

TEST(ChannelTest, ErrorsCarryCodeMessageAndPeer) {
  uint16_t port = 0;
  Server server(Server::Options{});
  server.Handle(kRefuse, [](const Buffer&, const CallContext&) {
    return StatusOr<Segments>(FailedPrecondition("not configured"));
  });
  port = server.Start().value();
  Channel channel({.peer = "parameter-server 3"});
  channel.SetAddress(Loopback(port));
  const Status status = channel.Call(kRefuse, {}, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "parameter-server 3 at " + Loopback(port) + ": not configured");
  EXPECT_EQ(channel.Call(kUnhandled, {}, Soon()).status().code(), StatusCode::kInvalidArgument);
}

TEST(ChannelTest, SilentPeerIsDeadlineExceededAndTheConnectionStaysUsable) {
  std::promise<void> release;
  auto released = release.get_future().share();
  std::atomic<int> num_calls{0};
  Server server(Server::Options{});
  server.Handle(kEcho, [&](const Buffer& request, const CallContext& context) {
    if (num_calls++ == 1) released.wait_for(std::chrono::seconds(120));
    return Echo(request, context);
  });
  const uint16_t port = server.Start().value();
  Channel channel({.peer = "slow"});
  channel.SetAddress(Loopback(port));
  // Connected, however long that takes: a peer that is not reached is another failure.
  ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  const auto first = Pattern(100, 1);
  const Status status = channel.Call(kEcho, SegmentsOf(first), In(50)).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.ToString();
  EXPECT_NE(status.message().find("slow at"), std::string::npos);
  EXPECT_NE(status.message().find("Echo"), std::string::npos);
  release
      .set_value();  // the late answer now comes first, and must not be taken for the next call's
  const auto second = Pattern(200, 2);
  auto reply = channel.Call(kEcho, SegmentsOf(second), Soon());
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_TRUE(SameBytes(*reply, second));
}

TEST(ChannelTest, RequestCutOffAtItsDeadlineIsNotReadAfterwards) {
  constexpr size_t kBodyBytes = 32 << 20;  // more than the kernel takes
  asio::io_context io;
  Tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  Channel channel({.peer = "stuck"});
  channel.SetAddress(Loopback(acceptor.local_endpoint().port()));
  for (int i = 0; i < 3; ++i) {
    // Nobody reads until the call has failed and the body is gone.
    {
      const auto body = Pattern(kBodyBytes);
      const Status status = channel.Call(kEcho, SegmentsOf(body), In(2000)).status();
      ASSERT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.ToString();
    }
    Tcp::socket peer(io);
    acceptor.accept(peer);
    std::vector<std::byte> chunk(1 << 20);
    ErrorCode error;
    size_t num_received = 0;
    while (!error && num_received < kBodyBytes) {
      num_received += peer.read_some(asio::buffer(chunk), error);
    }
    EXPECT_LT(num_received, kBodyBytes);
  }
}

TEST(ChannelTest, AbsentPeerIsUnavailableAndNamed) {
  const ClosedPort port;
  const std::string address = Loopback(port.number());
  Channel channel({.peer = "embedding-worker 0"});
  channel.SetAddress(address);
  const auto call = [&](auto deadline) { return channel.Call(kEcho, {}, deadline).status(); };
  const Status status = FailureOf(call, "refused", 200);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "embedding-worker 0 at " + address + ": Connection refused");
}

TEST(ChannelTest, WithoutAddressOrWithABadOneIsUnavailableByTheDeadline) {
  Channel channel({.peer = "worker 1"});
  Status status = channel.Call(kEcho, {}, In(20)).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("not known yet"), std::string::npos) << status.message();
  channel.SetAddress("nonsense");
  const auto call = [&](auto deadline) { return channel.Call(kEcho, {}, deadline).status(); };
  status = FailureOf(call, "host:port", 100);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("host:port"), std::string::npos) << status.message();
  EXPECT_EQ(channel.Call(kEcho, {}, Clock::now()).status().code(), StatusCode::kUnavailable);
}

TEST(ChannelTest, HostNamesAreResolved) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress("localhost:" + std::to_string(port));
  auto reply = channel.Call(kEcho, {}, Soon());
  EXPECT_TRUE(reply.ok()) << reply.status().ToString();
}

TEST(ChannelTest, CallsWaitForTheFirstAddress) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  const auto body = Pattern(10);
  auto reply = Async(channel, SegmentsOf(body), Soon());
  channel.SetAddress(Loopback(port));
  EXPECT_TRUE(reply.get().ok());
}

// A first call that finds the channel's own thread in the lead, which leaves it then, must not
// sleep until that thread looks again, 50 to 100 ms later. Beside it calls that come so early that
// they lead themselves: a loaded machine holds up as many of them.
TEST(ChannelTest, FirstCallTakesTheLeadThatTheThreadLeaves) {
  constexpr int kChannels = 60;
  uint16_t port = 0;
  auto server = EchoServer(&port);
  int num_slow = 0, num_slow_early = 0;
  for (int i = 0; i < 2 * kChannels; ++i) {
    const bool is_early = i % 2 == 0;
    Channel channel({.peer = "echo"});
    channel.SetAddress(Loopback(port));
    if (!is_early) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto begin = Clock::now();
    ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
    if (Clock::now() - begin > std::chrono::milliseconds(49)) {
      ++(is_early ? num_slow_early : num_slow);
    }
  }
  EXPECT_LE(num_slow, num_slow_early + kChannels / 4);
}

TEST(ChannelTest, PeerRestartsElsewhereAndNoCallIsLost) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  std::atomic<bool> stop{false};
  std::atomic<int> num_good{0};
  std::atomic<int> num_bad{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; !stop; ++i) {
        const auto body = Pattern(50'000 + i, t);
        auto reply = channel.Call(kEcho, SegmentsOf(body), Soon());
        ++(reply.ok() && SameBytes(*reply, body) ? num_good : num_bad);
      }
    });
  }
  for (int restart = 0; restart < 5; ++restart) {
    const int seen = num_good;
    const auto deadline = Soon();
    while (num_good < seen + 20 && Clock::now() < deadline) std::this_thread::yield();
    // Alternately a clean stop and one that cuts connections off.
    server->Stop(std::chrono::milliseconds(restart % 2 == 0 ? 5000 : 0));
    server = EchoServer(&port);
    channel.SetAddress(Loopback(port));
  }
  const int seen = num_good;
  const auto deadline = Soon();
  while (num_good < seen + 20 && Clock::now() < deadline) std::this_thread::yield();
  stop = true;
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(num_bad, 0);
  EXPECT_GE(num_good, 6 * 20);
}

TEST(ChannelTest, PeerRestartsOnTheSamePortWithoutNews) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  server->Stop();
  auto waiting = Async(channel, {}, Soon());
  server = EchoServer(&port, {}, port);
  EXPECT_TRUE(waiting.get().ok());
}

TEST(ChannelTest, UnavailableAnswersAreRepeated) {
  std::atomic<int> num_calls{0};
  Server server(Server::Options{});
  server.Handle(kEcho, [&](const Buffer& request, const CallContext& context) {
    if (num_calls++ < 3) return StatusOr<Segments>(Unavailable("loading"));
    return Echo(request, context);
  });
  const uint16_t port = server.Start().value();
  Channel channel({.peer = "busy"});
  channel.SetAddress(Loopback(port));
  EXPECT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  EXPECT_EQ(num_calls, 4);
  num_calls = -1'000'000;
  const auto call = [&](auto deadline) { return channel.Call(kEcho, {}, deadline).status(); };
  const Status status = FailureOf(call, "loading", 100);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("loading"), std::string::npos) << status.message();
}

TEST(ChannelTest, TheReasonOfARefusalOutlivesASilentRepetition) {
  std::atomic<int> num_calls{0};
  std::promise<void> done;
  Server server(Server::Options{});
  server.Handle(kEcho, [&, ended = done.get_future().share()](const Buffer&, const CallContext&) {
    if (num_calls++ > 0) ended.wait_for(std::chrono::seconds(120));
    return StatusOr<Segments>(Unavailable("loading"));
  });
  const uint16_t port = server.Start().value();
  Channel channel({.peer = "busy"});
  channel.SetAddress(Loopback(port));
  const Status status = channel.Call(kEcho, {}, In(3000)).status();
  done.set_value();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  EXPECT_NE(status.message().find("loading"), std::string::npos) << status.message();
}

TEST(ChannelTest, RequestAboveTheLimitIsRefusedBeforeItIsSent) {
  Channel channel({.peer = "echo", .max_body_bytes = 10});
  EXPECT_EQ(channel.Call(kEcho, SegmentsOf(Pattern(11)), Soon()).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(ChannelTest, PeerThatSpeaksGarbageIsUnavailable) {
  asio::io_context io;
  Tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  acceptor.non_blocking(true);
  std::atomic<bool> stop{false};
  std::thread peer([&] {
    while (!stop) {
      ErrorCode error;
      Tcp::socket socket(io);
      acceptor.accept(socket, error);
      if (!error) asio::write(socket, asio::buffer(Pattern(64)), error);
      std::this_thread::yield();
    }
  });
  Channel channel({.peer = "liar"});
  channel.SetAddress(Loopback(acceptor.local_endpoint().port()));
  const Status status = channel.Call(kEcho, {}, In(3000)).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  stop = true;
  peer.join();
}

TEST(ChannelTest, DestructionFailsWhatIsPending) {
  std::promise<void> release;
  auto released = release.get_future().share();
  Server server(Server::Options{});
  server.Handle(kEcho, [&](const Buffer& request, const CallContext& context) {
    released.wait_for(std::chrono::seconds(120));
    return Echo(request, context);
  });
  const uint16_t port = server.Start().value();
  const auto body = Pattern(1 << 20);
  std::vector<std::future<Result>> replies;
  {
    Channel channel({.peer = "slow"});
    channel.SetAddress(Loopback(port));
    for (int i = 0; i < 20; ++i) replies.push_back(Async(channel, SegmentsOf(body), Soon()));
  }
  for (auto& reply : replies) {
    EXPECT_EQ(reply.get().status().code(), StatusCode::kUnavailable);
  }
  release.set_value();
}

TEST(ChannelTest, CloseFailsWhatIsPendingAndWhatComesLater) {
  Channel channel({.peer = "nobody"});
  std::promise<StatusCode> pending;
  channel.CallAsync(kEcho, {}, Soon(), [&pending](const Result& result) {
    pending.set_value(result.status().code());
  });
  channel.Close();
  channel.Close();
  EXPECT_EQ(pending.get_future().get(), StatusCode::kUnavailable);
  const Result later = channel.Call(kEcho, {}, Soon());
  EXPECT_NE(later.status().message().find("closed"), std::string::npos);
}

TEST(ChannelTest, ACallbackOfTheChannelMayNotWaitForIt) {
  uint16_t port = 0;
  auto server = EchoServer(&port);
  std::promise<StatusCode> inner;
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  channel.CallAsync(kEcho, {}, Soon(), [&](const Result& result) {
    EXPECT_TRUE(result.ok());
    inner.set_value(channel.Call(kEcho, {}, Soon()).status().code());
  });
  EXPECT_EQ(inner.get_future().get(), StatusCode::kInternal);
}

}  // namespace
}  // namespace persia::net

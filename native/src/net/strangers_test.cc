// A running server among thousands of connections that prove nothing.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "net/channel.h"
#include "net/handshake.h"
#include "net/test_support.h"
#include "net/unproven.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

constexpr MethodId kJobsEcho{1, "Echo", {Role::kWorker}};

// Sockets without asio: one descriptor each, and a source address that can be chosen.
UniqueFd NewSocket(const char* from = "127.0.0.1") {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  ::inet_pton(AF_INET, from, &address.sin_addr);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const timeval timeout{120, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  return fd;
}

void ConnectTo(uint16_t port, const UniqueFd& fd) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  ::inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  ASSERT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
}

void Send(const UniqueFd& fd, std::span<const std::byte> bytes) {
  ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);  // the server may have closed
}

void SendFrame(const UniqueFd& fd, FrameHeader header, std::span<const std::byte> body) {
  header.body_bytes = body.size();
  std::array<std::byte, kHeaderBytes> bytes;
  EncodeHeader(header, bytes);
  Send(fd, bytes);
  Send(fd, body);
}

// The body of the next reply; empty where the server has closed, or says no.
std::vector<std::byte> Receive(const UniqueFd& fd) {
  std::array<std::byte, kHeaderBytes> bytes;
  if (::recv(fd.get(), bytes.data(), bytes.size(), MSG_WAITALL) != kHeaderBytes) return {};
  auto header = DecodeHeader(bytes, 1 << 20);
  if (!header.ok() || header->status != 0) return {};
  std::vector<std::byte> body(header->body_bytes);
  const ssize_t size = ::recv(fd.get(), body.data(), body.size(), MSG_WAITALL);
  body.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return body;
}

class StrangersTest : public ::testing::Test {
 protected:
  void StartServer(std::chrono::milliseconds patience = std::chrono::minutes(5)) {
    Identity worker{.role = Role::kWorker};
    worker.accepted[worker.role] = worker.key;
    security_.identity = std::make_shared<const Identity>(worker);
    server_ = std::make_unique<Server>(Server::Options{
        .handshake_patience = patience, .max_connections = 1000, .security = security_});
    server_->Handle(kJobsEcho, Echo);
    auto port = server_->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    port_ = *port;
  }
  std::unique_ptr<Channel> Connect() const {
    auto channel =
        std::make_unique<Channel>(Channel::Options{.peer = "server", .security = security_});
    channel->SetAddress(Loopback(port_));
    return channel;
  }
  static Status CallEcho(Channel& channel) {
    const auto body = Pattern(100'000);
    const auto reply = channel.Call(kJobsEcho, SegmentsOf(body), Soon());
    if (!reply.ok()) return reply.status();
    return SameBytes(reply.value(), body) ? Status::Ok() : Internal("another body");
  }
  // What a client of the job does, over a socket that is connected: empty where it fails.
  std::vector<std::byte> ProveAndEcho(const UniqueFd& fd, std::span<const std::byte> body) const {
    const ClientHandshake client(*security_.identity, {});
    const FrameHeader handshake{.method = kAuthenticate.number};
    SendFrame(fd, handshake, std::as_bytes(std::span(&client.hello(), 1)));
    const auto proof = client.Answer(Receive(fd));
    if (!proof.ok()) return {};
    SendFrame(fd, handshake, proof.value());
    SendFrame(fd, {.method = kJobsEcho.number, .deadline_ms = 60'000}, body);
    return Receive(fd);
  }
  uint64_t Value(std::string_view key) const {
    Metrics metrics;
    server_->AddMetrics(&metrics);
    return metrics[key];
  }

  Security security_;
  std::unique_ptr<Server> server_;
  uint16_t port_ = 0;
};

TEST_F(StrangersTest, ThousandsStopNoCallAndKeepNobodyOut) {
  StartServer();
  const auto channel = Connect();
  ASSERT_TRUE(CallEcho(*channel).ok());
  std::atomic<bool> ended{false};
  std::atomic<int> num_calls{0};
  std::thread job([&] {
    while (!ended) {
      const Status status = CallEcho(*channel);
      EXPECT_TRUE(status.ok()) << status.ToString();
      ++num_calls;
    }
  });
  constexpr int kStrangers = 4000;
  std::deque<UniqueFd> open;
  const auto bytes = Pattern(500);
  for (int i = 0; i < kStrangers; ++i) {
    open.push_back(NewSocket());
    ConnectTo(port_, open.back());
    // Silent, half a header, and no frame at all.
    if (i % 3 > 0) Send(open.back(), std::span(bytes).first(i % 3 == 1 ? 10 : bytes.size()));
    if (open.size() > 300) open.pop_front();
    if (i % 1000 == 999) {
      const Status status = CallEcho(*Connect());
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
  }
  const int calls_before = num_calls;
  while (num_calls < calls_before + 2) std::this_thread::yield();
  ended = true;
  job.join();
  EXPECT_EQ(channel->stats().metrics["num_connects"], 1u);
  EXPECT_LE(Value("rpc_num_connections"), 128u + 5);
  EXPECT_GT(Value("rpc_num_crowded_out"), 0u);
}

TEST_F(StrangersTest, AHostThatHasOneConnectionKeepsIt) {
  StartServer();
  const UniqueFd slow = NewSocket("127.0.0.9");
  ConnectTo(port_, slow);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) {
    // No host of them has half of the places.
    strangers.push_back(NewSocket(("127.0.0." + std::to_string(2 + i % 5)).c_str()));
    ConnectTo(port_, strangers.back());
  }
  const auto deadline = Soon();
  while (Value("rpc_num_crowded_out") < 201 - 128 && Clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(Value("rpc_num_connections"), 128u);
  const auto body = Pattern(1000);
  EXPECT_EQ(ProveAndEcho(slow, body), body);
}

// One after another must give its descriptor back without a pause: a client of the job waits behind
// a thousand strangers.
TEST_F(StrangersTest, WithoutDescriptorsTheJobGetsInAfterAllStrangers) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  constexpr size_t kStrangers = 1000;
  rlimit many = before;
  many.rlim_cur = std::min<rlim_t>(before.rlim_max, 4096);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &many), 0);
  StartServer();
  std::vector<UniqueFd> strangers;
  for (size_t i = 0; i < kStrangers; ++i) strangers.push_back(NewSocket());
  const UniqueFd client = NewSocket();
  rlimit few = many;
  few.rlim_cur = static_cast<rlim_t>(client.get()) + 9;  // eight connections
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  for (const UniqueFd& stranger : strangers) ConnectTo(port_, stranger);
  ConnectTo(port_, client);
  const auto body = Pattern(1000);
  EXPECT_EQ(ProveAndEcho(client, body), body);
  EXPECT_GE(Value("rpc_num_crowded_out"), kStrangers - 8);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(UnprovenConnectionsTest, TheHostWithTheMostGivesItsOldest) {
  UnprovenConnections all;
  EXPECT_EQ(all.FirstToClose(), std::nullopt);
  all.Add(1, "a");
  all.Add(2, "b");
  for (uint64_t tag = 3; tag <= 9; ++tag) all.Add(tag, "b");
  EXPECT_EQ(all.FirstToClose(), 1u);  // the ranks of one machine may be as many as "b" has
  all.Add(10, "b");
  EXPECT_EQ(all.FirstToClose(), 2u);
  for (uint64_t tag = 3; tag <= 9; ++tag) all.Remove(tag);
  EXPECT_EQ(all.OldestOf("a"), 1u);
  EXPECT_EQ(all.CountOf("b"), 2u);
  all.Remove(2);
  all.Remove(2);
  all.Remove(1);
  EXPECT_EQ(all.OldestOf("a"), std::nullopt);
  EXPECT_EQ(all.CountOf("a"), 0u);
  EXPECT_EQ(all.FirstToClose(), 10u);
  EXPECT_EQ(all.size(), 1u);
}

}  // namespace
}  // namespace persia::net

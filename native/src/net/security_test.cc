// Servers and channels with identities, over real sockets; and the messages of the handshake alone.
#include "net/security.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "net/audit.h"
#include "net/channel.h"
#include "net/test_support.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

constexpr MethodId kWorkersEcho{1, "Echo", {Role::kWorker}, true};
constexpr MethodId kAdminsOnly{5, "AdminsOnly", {Role::kAdmin}};

RoleKey KeyOf(Role role, uint8_t job = 0) {
  RoleKey key;
  key.fill(static_cast<std::byte>(16 * job + static_cast<uint8_t>(role)));
  return key;
}

Identity ServerIdentity(uint8_t job = 0) {
  Identity identity{.role = Role::kServer, .key = KeyOf(Role::kServer, job)};
  for (const Role role : {Role::kWorker, Role::kAdmin}) identity.accepted[role] = KeyOf(role, job);
  return identity;
}

Security With(Identity identity) {
  return {.identity = std::make_shared<const Identity>(std::move(identity))};
}

Security Client(Role role, uint8_t job = 0) {
  return With({.role = role, .key = KeyOf(role, job)});
}

class SecurityTest : public ::testing::Test {
 protected:
  void SetUp() override { TakeAuditEvents(); }

  void StartServer(Server::Options options = {.security = With(ServerIdentity())},
                   uint16_t port = 0) {
    server_ = std::make_unique<Server>(options);
    for (const MethodId& method : {kWorkersEcho, kAdminsOnly}) {
      server_->Handle(method, [this](const Buffer& request, const CallContext& context) {
        ++num_handled_;
        last_caller_ = context.caller;
        return Echo(request, context);
      });
    }
    auto started = server_->Start("127.0.0.1", port);
    ASSERT_TRUE(started.ok()) << started.status().ToString();
    port_ = *started;
  }
  std::unique_ptr<Channel> Connect(Security security) {
    auto channel = std::make_unique<Channel>(
        Channel::Options{.peer = "parameter-server 0", .security = std::move(security)});
    channel->SetAddress(Loopback(port_));
    return channel;
  }
  static Status CallEcho(Channel& channel) {
    const auto body = Pattern(100'000);
    const auto reply = channel.Call(kWorkersEcho, SegmentsOf(body), Soon());
    if (!reply.ok()) return reply.status();
    return SameBytes(reply.value(), body) ? Status::Ok() : Internal("another body");
  }
  uint64_t Value(std::string_view key) const {
    Metrics metrics;
    server_->AddMetrics(&metrics);
    return metrics[key];
  }
  // The call fails at once, with what to do about it.
  void ExpectRefused(Security security, const std::string& why) {
    const auto channel = Connect(std::move(security));
    const auto begin = Clock::now();
    const Status status = CallEcho(*channel);
    EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << status.ToString();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("parameter-server 0 at 127.0.0.1"), std::string::npos);
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60)) << "it waited for the deadline";
    EXPECT_EQ(num_handled_, 0);
  }
  void WaitFor(std::string_view key, uint64_t value) {
    const auto deadline = Soon();
    while (Value(key) != value && Clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(Value(key), value) << key;
  }

  std::atomic<int> num_handled_{0};
  std::atomic<Role> last_caller_{Role::kNone};
  std::unique_ptr<Server> server_;
  uint16_t port_ = 0;
};

TEST_F(SecurityTest, ACallOfTheJobIsHandledAndAudited) {
  StartServer();
  const auto channel = Connect(Client(Role::kWorker));
  for (int i = 0; i < 3; ++i) {
    const Status status = CallEcho(*channel);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(last_caller_, Role::kWorker);
  EXPECT_EQ(channel->stats().metrics["num_connects"], 1u);
  const auto events = TakeAuditEvents();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].method, "Echo");
  EXPECT_EQ(events[0].outcome, "ok");
  EXPECT_EQ(events[0].role, Role::kWorker);
  EXPECT_EQ(events[0].peer.rfind("127.0.0.1:", 0), 0u) << events[0].peer;
  EXPECT_GT(events[0].time_s, 1.6e9);
  EXPECT_TRUE(TakeAuditEvents().empty());
}

TEST_F(SecurityTest, AnotherJobsKeyIsRefused) {
  StartServer();
  ExpectRefused(Client(Role::kWorker, 1), "set PERSIA_JOB_SECRET");
  WaitFor("rpc_num_refused_connections", 1);
  const auto events = TakeAuditEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].method, "connect");
  EXPECT_EQ(events[0].outcome.rfind("refused: ", 0), 0u) << events[0].outcome;
  EXPECT_NE(events[0].outcome.find("as role 'worker'"), std::string::npos) << events[0].outcome;
  EXPECT_EQ(events[0].role, Role::kNone);  // it has claimed to be a worker, and proved nothing
}

TEST_F(SecurityTest, ARoleThatIsNotAcceptedIsRefused) {
  StartServer();
  ExpectRefused(Client(Role::kLoader), "role 'loader' may not connect");
  EXPECT_EQ(Value("rpc_num_refused_connections"), 1u);
}

TEST_F(SecurityTest, AClientWithoutAnIdentityIsRefused) {
  StartServer();
  ExpectRefused({}, "set PERSIA_JOB_SECRET");
  EXPECT_EQ(Value("rpc_num_refused_connections"), 1u);
}

TEST_F(SecurityTest, AServerWithoutAnIdentityIsRefused) {
  StartServer(Server::Options{});
  ExpectRefused(Client(Role::kWorker), "set PERSIA_JOB_SECRET");
}

TEST_F(SecurityTest, EveryPendingCallFailsAtOnce) {
  StartServer();
  const auto channel = Connect({});
  std::vector<std::thread> callers;
  std::atomic<int> num_refused{0};
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      if (CallEcho(*channel).code() == StatusCode::kPermissionDenied) ++num_refused;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_refused, 8);
}

// Of an earlier version of persia, or of another program: one reply, then the end.
TEST_F(SecurityTest, ARequestWithoutAHandshakeIsAnsweredOnceAndClosed) {
  StartServer();
  for (const uint64_t body_bytes : {uint64_t{0}, uint64_t{40}, uint64_t{1} << 29}) {
    RawClient client(port_);
    FrameHeader header;
    header.method = kWorkersEcho.number;
    header.request_id = 7;
    header.deadline_ms = 30'000;
    header.body_bytes = body_bytes;
    std::array<std::byte, kHeaderBytes> bytes;
    EncodeHeader(header, bytes);
    client.Send(bytes);
    FrameHeader reply;
    std::string body;
    ASSERT_TRUE(client.Receive(&reply, &body));
    EXPECT_EQ(static_cast<StatusCode>(reply.status), StatusCode::kPermissionDenied);
    EXPECT_EQ(reply.request_id, 7u);
    EXPECT_TRUE(client.ClosedByServer());
  }
  EXPECT_EQ(num_handled_, 0);
}

TEST_F(SecurityTest, WrongProofsAndGarbageAreRefused) {
  StartServer();
  RawClient forger(port_);
  FrameHeader header;
  header.method = kAuthenticate.number;
  header.body_bytes = sizeof(Hello);
  const Hello hello{.role = Role::kWorker};
  forger.SendFrame(header, std::as_bytes(std::span(&hello, 1)));
  FrameHeader reply;
  std::string body;
  ASSERT_TRUE(forger.Receive(&reply, &body));
  ASSERT_EQ(body.size(), sizeof(Challenge));
  header.body_bytes = sizeof(Proof);
  // The server's own proof, sent back to it.
  forger.SendFrame(header, std::as_bytes(std::span(body)).subspan(sizeof(Nonce)));
  ASSERT_TRUE(forger.Receive(&reply, &body));
  EXPECT_EQ(static_cast<StatusCode>(reply.status), StatusCode::kPermissionDenied);
  EXPECT_TRUE(forger.ClosedByServer());
  RawClient garbage(port_);
  garbage.Send(Pattern(500));
  EXPECT_TRUE(garbage.ClosedByServer());
  EXPECT_EQ(Value("rpc_num_refused_connections"), 2u);
}

TEST_F(SecurityTest, APeerThatRestartsWithAnotherIdentityNeverHangsTheCaller) {
  StartServer();
  const auto channel = Connect(Client(Role::kWorker));
  EXPECT_TRUE(CallEcho(*channel).ok());
  server_.reset();
  StartServer({.security = With(ServerIdentity(1))}, port_);
  EXPECT_EQ(CallEcho(*channel).code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(CallEcho(*channel).code(), StatusCode::kPermissionDenied);
  server_.reset();
  StartServer({.security = With(ServerIdentity())}, port_);
  const Status status = CallEcho(*channel);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_F(SecurityTest, AMethodOfAnotherRoleIsRefusedAndTheConnectionSurvives) {
  StartServer();
  const auto channel = Connect(Client(Role::kWorker));
  const auto reply = channel->Call(kAdminsOnly, SegmentsOf(Pattern(300'000)), Soon());
  EXPECT_EQ(reply.code(), StatusCode::kPermissionDenied);
  EXPECT_NE(reply.status().message().find("role 'worker' may not call AdminsOnly; it needs admin"),
            std::string::npos)
      << reply.status().message();
  EXPECT_EQ(num_handled_, 0);
  EXPECT_TRUE(CallEcho(*channel).ok());
  EXPECT_EQ(channel->stats().metrics["num_connects"], 1u);
  EXPECT_TRUE(Connect(Client(Role::kAdmin))->Call(kAdminsOnly, {}, Soon()).ok());
}

TEST_F(SecurityTest, WhoNeverAuthenticatesIsClosed) {
  StartServer(
      {.handshake_patience = std::chrono::milliseconds(20), .security = With(ServerIdentity())});
  RawClient silent(port_);
  EXPECT_TRUE(silent.ClosedByServer());
  RawClient half_header(port_);
  half_header.Send(Pattern(10));
  EXPECT_TRUE(half_header.ClosedByServer());
  FrameHeader header;
  header.body_bytes = sizeof(Hello);
  const Hello hello{.role = Role::kWorker};
  // On a busy machine the time may be up before the greeting is sent: then by another connection.
  bool is_greeted = false;
  for (const auto deadline = Soon(); !is_greeted && Clock::now() < deadline;) {
    RawClient greets(port_);
    greets.SendFrame(header, std::as_bytes(std::span(&hello, 1)));
    FrameHeader reply;
    std::string body;
    is_greeted = greets.Receive(&reply, &body);
    EXPECT_TRUE(greets.ClosedByServer());
  }
  EXPECT_TRUE(is_greeted);
  const auto channel = Connect(Client(Role::kWorker));
  EXPECT_TRUE(CallEcho(*channel).ok());
}

// The limit of connections is far below what strangers open.
TEST_F(SecurityTest, StrangersDoNotKeepTheJobOut) {
  StartServer({.max_connections = 16, .security = With(ServerIdentity())});
  const auto before = Connect(Client(Role::kWorker));
  EXPECT_TRUE(CallEcho(*before).ok());
  std::vector<std::unique_ptr<RawClient>> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(std::make_unique<RawClient>(port_));
  const auto after = Connect(Client(Role::kWorker));
  const Status status = CallEcho(*after);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(CallEcho(*before).ok());
  EXPECT_EQ(before->stats().metrics["num_connects"], 1u);
  EXPECT_LE(Value("rpc_num_connections"), 16u);
  EXPECT_GE(Value("rpc_num_crowded_out"), 284u);
}

TEST_F(SecurityTest, AFullServerRefusesEvenTheJob) {
  StartServer({.max_connections = 2, .security = With(ServerIdentity())});
  const auto first = Connect(Client(Role::kWorker));
  const auto second = Connect(Client(Role::kWorker));
  EXPECT_TRUE(CallEcho(*first).ok());
  EXPECT_TRUE(CallEcho(*second).ok());
  const auto third = Connect(Client(Role::kWorker));
  EXPECT_EQ(third->Call(kWorkersEcho, {}, In(200)).code(), StatusCode::kUnavailable);
  EXPECT_TRUE(CallEcho(*first).ok());
}

TEST(HandshakeTest, AProofFitsItsConnectionAlone) {
  const Identity identity = ServerIdentity();
  const ClientHandshake client({.role = Role::kWorker, .key = KeyOf(Role::kWorker)}, {});
  const auto hello = std::as_bytes(std::span(&client.hello(), 1));
  ServerHandshake server;
  const auto challenge = server.OnHello(identity, hello, {});
  ASSERT_TRUE(challenge.ok());
  const auto proof = client.Answer(std::as_bytes(std::span(&challenge.value(), 1)));
  ASSERT_TRUE(proof.ok()) << proof.status().ToString();
  EXPECT_TRUE(server.OnProof(proof.value()).ok());
  ServerHandshake another;
  const auto fresh = another.OnHello(identity, hello, {});
  ASSERT_TRUE(fresh.ok());
  EXPECT_EQ(another.OnProof(proof.value()).code(), StatusCode::kPermissionDenied);
  // Another TLS connection below one of the ends: somebody passes the messages on.
  ChannelBinding binding = {};
  binding[0] = std::byte{1};
  ServerHandshake relayed;
  const auto passed_on = relayed.OnHello(identity, hello, binding);
  EXPECT_FALSE(client.Answer(std::as_bytes(std::span(&passed_on.value(), 1))).ok());
}

TEST(HandshakeTest, NothingIsProvedBeforeTheHello) {
  const ServerHandshake server;
  EXPECT_FALSE(server.OnProof(Proof{}).ok());
}

TEST(AuditTest, TheRingDropsTheOldest) {
  TakeAuditEvents();
  for (size_t i = 0; i < kMaxAuditEvents + 5; ++i) {
    RecordAuditEvent({.method = std::to_string(i)});
  }
  const auto events = TakeAuditEvents();
  ASSERT_EQ(events.size(), kMaxAuditEvents);
  EXPECT_EQ(events.front().method, "5");
}

TEST(AuditTest, RefusalsDoNotFillTheRing) {
  TakeAuditEvents();
  for (int i = 0; i < 1000; ++i) ReportRefusal("192.0.2.1:9", Role::kNone, "connect", "a test");
  EXPECT_LE(TakeAuditEvents().size(), 40u);  // ten for each second that has begun
}

}  // namespace
}  // namespace persia::net

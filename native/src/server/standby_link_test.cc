// A primary and its standby: equal bits, no operation lost or applied twice, and what is refused.
#include "server/standby_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/row_protocol.h"
#include "net/rpc.h"
#include "net/test_support.h"
#include "server/parameter_server.h"

namespace persia::server {
namespace {

using net::Channel;
using net::testing::FailureOf;
using net::testing::In;
using net::testing::Loopback;
using net::testing::Soon;

constexpr uint32_t kDim = 4;
// Of tests where something is lost; the lease is a quarter of it.
constexpr std::chrono::milliseconds kDeadline(5000);
// Of tests where nothing may be lost, however busy the machine is.
constexpr std::chrono::milliseconds kLongDeadline(120'000);

// With few rows of capacity, so that the order of operations decides which rows are evicted.
std::unique_ptr<ParameterServer> MakeReplica(bool is_standby, uint16_t* port,
                                             std::chrono::milliseconds deadline = kDeadline) {
  ParameterServer::Options options;
  options.store = {.capacity = 200, .num_internal_shards = 2};
  options.rpc.num_handler_threads = 4;
  options.standby_deadline = deadline;
  options.is_standby = is_standby;
  auto server = ParameterServer::Create(options);
  EXPECT_TRUE(server.ok());
  *port = server.value()->Start().value();
  return std::move(server).value();
}

class StandbyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    primary_ = MakeReplica(false, &primary_port_, kLongDeadline);
    standby_ = MakeReplica(true, &standby_port_, kLongDeadline);
    channel_.SetAddress(Loopback(primary_port_));
  }
  void Attach() {
    standby_->log()->Follow(primary_->incarnation());
    const Status attached =
        primary_->standby()->Attach(Loopback(standby_port_), standby_->incarnation());
    ASSERT_TRUE(attached.ok()) << attached.ToString();
    Await([this] { return standby_->log()->has_copy(); });
  }
  template <typename Condition>
  static void Await(Condition condition) {
    for (int i = 0; i < 24'000 && !condition(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ASSERT_TRUE(condition());
  }
  // As a standby does whose primary does not answer any more.
  static void TakeOver(ParameterServer& standby) {
    Await([&] { return standby.TakeOver(false).ok(); });
  }

  // With a reason that has `text`.
  static Status Refusal(Channel& channel, const std::string& text) {
    const auto call = [&](auto deadline) {
      return net::Call(channel, kCountRows, {}, deadline).status();
    };
    return FailureOf(call, text, 300);
  }

  Status Configure(uint32_t admit_after = 1) {
    TrainConfig config;
    config.optimizer.kind = OptimizerKind::kAdam;
    config.optimizer.lr = 0.05f;
    config.admit_after = admit_after;
    return net::Call(channel_, kConfigureServer, {config, false}, Soon());
  }
  // One batch: a lookup that inserts, and its update.
  void Train(uint64_t worker, uint64_t step) {
    std::vector<uint64_t> signs;
    for (uint64_t i = 0; i < 16; ++i) {
      const uint64_t sign = (worker * 7919 + step * 104729 + i * 31) % 400;
      if (std::find(signs.begin(), signs.end(), sign) == signs.end()) signs.push_back(sign);
    }
    const std::vector<SignBlock> blocks = {{kDim, static_cast<uint32_t>(signs.size())}};
    auto rows = net::Call(channel_, kLookupRows, {true, {blocks, signs}}, Soon());
    ASSERT_TRUE(rows.ok()) << rows.status().ToString();
    std::vector<float> gradients(rows->rows.begin(), rows->rows.end());
    for (float& value : gradients) value = value * 3.0f + 0.01f * static_cast<float>(step % 5);
    auto updated = net::Call(channel_, kUpdateRows,
                             {{worker, step}, rows->stamp, {blocks, signs}, gradients}, Soon());
    ASSERT_TRUE(updated.ok()) << updated.status().ToString();
  }
  // Values of all signs; those that are missing read as zeros.
  static std::vector<float> RowsOf(ParameterServer& server) {
    std::vector<uint64_t> signs(400);
    for (uint64_t i = 0; i < signs.size(); ++i) signs[i] = i;
    const std::vector<SignBlock> blocks = {{kDim, static_cast<uint32_t>(signs.size())}};
    auto rows = server.Lookup({false, {blocks, signs}});
    EXPECT_TRUE(rows.ok());
    return {rows->rows.begin(), rows->rows.end()};
  }

  uint16_t primary_port_ = 0, standby_port_ = 0;
  std::unique_ptr<ParameterServer> primary_, standby_;
  Channel channel_{{.peer = "parameter-server 0"}};
};

TEST_F(StandbyTest, HasTheBitsOfItsPrimary) {
  Attach();
  ASSERT_TRUE(Configure().ok());
  std::vector<std::thread> workers;
  for (uint64_t worker = 1; worker <= 3; ++worker) {
    workers.emplace_back([this, worker] {
      for (uint64_t step = 1; step <= 60; ++step) Train(worker, step);
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_GT(primary_->metrics()["num_evicted_rows"], 0u);
  primary_->standby()->Fence("the test ends it");
  ASSERT_TRUE(standby_->TakeOver(true).ok());
  EXPECT_EQ(RowsOf(*standby_), RowsOf(*primary_));
  EXPECT_EQ(standby_->metrics()["num_updates"], 180u);
}

// The rows, their state, the order of eviction and the updates that are recognised: what is trained
// after the copy ends in the same bits only if all of them are equal.
TEST_F(StandbyTest, IsFilledWhileTrainingContinues) {
  ASSERT_TRUE(Configure().ok());
  for (uint64_t step = 1; step <= 40; ++step) Train(1, step);
  std::atomic<bool> is_attached = false;
  std::thread worker([&] {
    for (uint64_t step = 41; step <= 80 || !is_attached; ++step) Train(1, step);
  });
  Attach();
  is_attached = true;
  worker.join();
  for (uint64_t step = 1; step <= 40; ++step) Train(2, step);
  const uint64_t num_repeated = primary_->metrics()["num_repeated_updates"];
  primary_->standby()->Fence("the test ends it");
  ASSERT_TRUE(standby_->TakeOver(true).ok());
  EXPECT_EQ(RowsOf(*standby_), RowsOf(*primary_));
  EXPECT_EQ(num_repeated, 0u);
  // An update of before the copy is recognised.
  channel_.SetAddress(Loopback(standby_port_));
  const std::vector<uint64_t> signs = {5};
  const std::vector<SignBlock> blocks = {{kDim, 1}};
  const std::vector<float> gradient(kDim, 1.0f);
  ASSERT_TRUE(
      net::Call(channel_, kUpdateRows, {{1, 3}, {}, {blocks, signs}, gradient}, Soon()).ok());
  EXPECT_EQ(standby_->metrics()["num_repeated_updates"], 1u);
}

TEST_F(StandbyTest, HasAStandbyOfItsOwnAfterTheTakeOver) {
  Attach();
  ASSERT_TRUE(Configure().ok());
  for (uint64_t step = 1; step <= 20; ++step) Train(1, step);
  primary_->standby()->Fence("the test ends it");
  ASSERT_TRUE(standby_->TakeOver(true).ok());
  const uint16_t port = standby_port_;
  primary_ = std::move(standby_);
  standby_ = MakeReplica(true, &standby_port_, kLongDeadline);
  channel_.SetAddress(Loopback(port));
  Attach();
  for (uint64_t step = 21; step <= 40; ++step) Train(1, step);
  primary_->standby()->Fence("the test ends it");
  ASSERT_TRUE(standby_->TakeOver(true).ok());
  EXPECT_EQ(RowsOf(*standby_), RowsOf(*primary_));
}

TEST_F(StandbyTest, AnUpdateThatIsRepeatedAfterTheTakeOverIsNotAppliedAgain) {
  Attach();
  ASSERT_TRUE(Configure().ok());
  const std::vector<uint64_t> signs = {5};
  const std::vector<SignBlock> blocks = {{kDim, 1}};
  const std::vector<float> gradient(kDim, 1.0f);
  ASSERT_TRUE(net::Call(channel_, kLookupRows, {true, {blocks, signs}}, Soon()).ok());
  const UpdateRowsRequest update = {{9, 1}, {}, {blocks, signs}, gradient};
  ASSERT_TRUE(net::Call(channel_, kUpdateRows, update, Soon()).ok());
  const std::vector<float> rows = RowsOf(*primary_);
  primary_.reset();
  TakeOver(*standby_);
  channel_.SetAddress(Loopback(standby_port_));
  ASSERT_TRUE(net::Call(channel_, kUpdateRows, update, Soon()).ok());
  EXPECT_EQ(standby_->metrics()["num_repeated_updates"], 1u);
  EXPECT_EQ(RowsOf(*standby_), rows);
}

TEST_F(StandbyTest, RefusesCallersAndDoesNotTakeOverWhileTheLeaseMayBeValid) {
  Attach();
  Channel direct({.peer = "the standby"});
  direct.SetAddress(Loopback(standby_port_));
  const Status refused = Refusal(direct, "is a standby");
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << refused.ToString();
  EXPECT_NE(refused.message().find("is a standby"), std::string::npos);
  // Right after a message: a busy machine may send the next one after the lease has expired.
  Await([this] { return standby_->log()->silent_for() < std::chrono::milliseconds(100); });
  EXPECT_EQ(standby_->TakeOver(false).code(), StatusCode::kUnavailable);
  EXPECT_TRUE(net::Call(channel_, kCountRows, {}, Soon()).ok());
}

// Whatever the primary believes: reads too, and at once.
TEST_F(StandbyTest, AReplacedPrimaryAnswersNothing) {
  Attach();
  ASSERT_TRUE(Configure().ok());
  Train(1, 1);
  // As if the primary had been frozen for longer than its lease.
  ASSERT_TRUE(standby_->TakeOver(true).ok());
  Await([this] { return primary_->standby()->state() == StandbyLink::State::kBroken; });
  Await([this] { return !primary_->standby()->CheckServes().ok(); });
  EXPECT_EQ(Refusal(channel_, "has expired").code(), StatusCode::kUnavailable);
  const TrainConfig config;
  EXPECT_FALSE(net::Call(channel_, kConfigureServer, {config, true}, In(300)).ok());
  EXPECT_EQ(primary_->metrics()["num_updates"], 1u);
  primary_->standby()->Fence("replaced by embedding-parameter-server 0 at 1.2.3.4:5");
  const Status refused = Refusal(channel_, "1.2.3.4:5");
  EXPECT_NE(refused.message().find("1.2.3.4:5"), std::string::npos) << refused.ToString();
}

TEST_F(StandbyTest, ALostStandbyHoldsUpdatesUntilItIsReleased) {
  primary_ = MakeReplica(false, &primary_port_);
  channel_.SetAddress(Loopback(primary_port_));
  Attach();
  ASSERT_TRUE(Configure().ok());
  standby_.reset();
  Await([this] { return primary_->standby()->state() == StandbyLink::State::kBroken; });
  std::thread worker([this] { Train(1, 1); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(primary_->metrics()["num_updates"], 0u);
  primary_->standby()->Release();
  worker.join();
  EXPECT_EQ(primary_->metrics()["num_updates"], 1u);
}

// Operations that wait for the standby hold some of the handler threads, and others are answered.
TEST_F(StandbyTest, AFrozenStandbyHoldsNoHandlerThreadFromOthers) {
  Attach();
  ASSERT_TRUE(Configure().ok());
  // Accepts connections, and never answers.
  asio::io_context io;
  const asio::ip::tcp::acceptor frozen(
      io, asio::ip::tcp::endpoint(asio::ip::address_v4::loopback(), 0));
  primary_->standby()->Release();
  ASSERT_TRUE(primary_->standby()->Attach(Loopback(frozen.local_endpoint().port()), 77).ok());
  std::vector<std::thread> callers;
  for (int i = 0; i < 12; ++i) {
    callers.emplace_back([this] {
      Channel channel({.peer = "parameter-server 0"});
      channel.SetAddress(Loopback(primary_port_));
      const std::vector<float> row(kDim, 1.0f);
      const std::vector<uint64_t> signs = {1};
      const std::vector<SignBlock> blocks = {{kDim, 1}};
      static_cast<void>(net::Call(channel, kSetRows, {{blocks, signs}, row}, Soon()));
    });
  }
  // Refused, as the lease expires, but answered: long before the deadline of the replication.
  Await([this] { return !primary_->standby()->CheckServes().ok(); });
  EXPECT_EQ(net::Call(channel_, kCountRows, {}, In(10'000)).code(), StatusCode::kUnavailable);
  primary_->standby()->Release();
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(net::Call(channel_, kCountRows, {}, Soon()).ok());
}

// An operation may wait until the copy makes room for it, or take longer than the lease.
TEST_F(StandbyTest, ALongOperationHoldsUpNeitherTheCopyNorTheLease) {
  ASSERT_TRUE(Configure().ok());
  for (uint64_t step = 1; step <= 10; ++step) Train(1, step);
  // In the standby's place: takes no piece of the copy before the operation has begun.
  std::atomic<bool> has_begun = false, has_copy = false;
  std::atomic<uint64_t> num_heartbeats = 0;
  const auto take = [&](const ReplicateRequest& request, const net::CallContext&) -> Status {
    if (request.kind == ReplicateKind::kHeartbeat) ++num_heartbeats;
    if (request.kind == ReplicateKind::kCopyConfig) Await([&] { return has_begun.load(); });
    if (request.kind == ReplicateKind::kCopyEnd) has_copy = true;
    return Status::Ok();
  };
  net::Server receiver({.num_handler_threads = 4});
  receiver.Handle(kReplicate, net::MakeHandler(kReplicate, take));
  const uint16_t port = receiver.Start().value();
  StandbyLink& link = *primary_->standby();
  ASSERT_TRUE(link.Attach(Loopback(port), 77).ok());
  const auto reply = link.Run(kClearRows, Buffer(), [&]() -> StatusOr<Segments> {
    has_begun = true;
    Await([&] { return has_copy.load(); });
    Await([&] { return !link.is_copying(); });
    // The lease of the messages before has certainly expired then, and another one is valid.
    std::this_thread::sleep_for(2 * LeaseOf(kLongDeadline));
    const uint64_t known = num_heartbeats;
    Await([&] { return num_heartbeats > known + 1 && link.CheckServes().ok(); });
    return Segments();
  });
  EXPECT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(link.state(), StandbyLink::State::kReplicating);
  has_begun = true;  // also where it was refused
  link.Release();
}

TEST_F(StandbyTest, AnOperationThatFailsOnTheStandbyAloneMakesItUnfit) {
  Attach();
  ASSERT_TRUE(Configure().ok());
  Await([this] {
    return standby_->log()->num_received() == 1 && standby_->log()->num_waiting() == 0;
  });
  Channel direct({.peer = "the standby"});
  direct.SetAddress(Loopback(standby_port_));
  // A body that no primary could have applied stands for an operation that runs out of memory here.
  const std::vector<std::byte> body(3);
  const ReplicateRequest operation{primary_->incarnation(),
                                   standby_->incarnation(),
                                   ReplicateKind::kOperation,
                                   kUpdateRows.number,
                                   1,
                                   body};
  ASSERT_TRUE(net::Call(direct, kReplicate, operation, Soon()).ok());
  Await([this] { return standby_->log()->state() == OperationLog::State::kUnfit; });
  EXPECT_EQ(standby_->TakeOver(true).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(standby_->metrics()["is_unfit_standby"], 1u);
  Await([this] { return primary_->standby()->state() == StandbyLink::State::kBroken; });
  EXPECT_NE(primary_->standby()->reason().find("unfit"), std::string::npos);
  primary_->standby()->Release();
  Train(1, 1);
  EXPECT_EQ(primary_->metrics()["replicates"], 0u);
}

TEST_F(StandbyTest, AnOperationThatFailsHalfWayBreaksTheLink) {
  const auto out_of_memory = []() -> StatusOr<Segments> { throw std::bad_alloc(); };
  const auto fails = []() -> StatusOr<Segments> { return Internal("half of it is done"); };
  const auto is_refused = []() -> StatusOr<Segments> { return InvalidArgument("nothing is done"); };
  StandbyLink& link = *primary_->standby();
  EXPECT_THROW(static_cast<void>(link.Run(kClearRows, Buffer(), out_of_memory)), std::bad_alloc);
  EXPECT_EQ(link.state(), StandbyLink::State::kAlone);
  Attach();
  EXPECT_FALSE(link.Run(kClearRows, Buffer(), is_refused).ok());
  EXPECT_EQ(link.state(), StandbyLink::State::kReplicating);
  EXPECT_THROW(static_cast<void>(link.Run(kClearRows, Buffer(), out_of_memory)), std::bad_alloc);
  EXPECT_EQ(link.state(), StandbyLink::State::kBroken);
  link.Release();
  standby_ = MakeReplica(true, &standby_port_, kLongDeadline);
  Attach();
  EXPECT_EQ(link.Run(kClearRows, Buffer(), fails).code(), StatusCode::kInternal);
  EXPECT_EQ(link.state(), StandbyLink::State::kBroken);
  EXPECT_NE(link.reason().find("half of it is done"), std::string::npos) << link.reason();
  EXPECT_EQ(standby_->log()->num_received(), 0u);
}

TEST_F(StandbyTest, RefusesMessagesOfStrangers) {
  Attach();
  Channel direct({.peer = "the standby"});
  direct.SetAddress(Loopback(standby_port_));
  const uint64_t primary = primary_->incarnation(), standby = standby_->incarnation();
  for (const auto& [from, to] : {std::pair(primary + 1, standby), std::pair(primary, standby + 1),
                                 std::pair(uint64_t{0}, standby)}) {
    const ReplicateRequest message{from, to, ReplicateKind::kOperation, kClearRows.number, 0, {}};
    const Status refused = net::Call(direct, kReplicate, message, Soon());
    EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.ToString();
  }
  EXPECT_EQ(standby_->log()->num_received(), 0u);
  EXPECT_EQ(standby_->log()->state(), OperationLog::State::kFollowing);
}

TEST_F(StandbyTest, RefusesConfigsThatItCannotReplicate) {
  const Status status = Configure(2);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("admit_after"), std::string::npos);
}

// As loading a checkpoint does, which asks the store alone.
TEST_F(StandbyTest, IsNotAttachedToAConfigThatItCannotReplicate) {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdam;
  config.admit_after = 2;
  ASSERT_TRUE(primary_->embedding_store().Configure(config, false).ok());
  const Status refused =
      primary_->standby()->Attach(Loopback(standby_port_), standby_->incarnation());
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.ToString();
  EXPECT_NE(refused.message().find("admit_after"), std::string::npos) << refused.ToString();
  EXPECT_EQ(primary_->standby()->state(), StandbyLink::State::kAlone);
}

}  // namespace
}  // namespace persia::server

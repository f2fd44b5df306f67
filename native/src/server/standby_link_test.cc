// A primary and its standby: equal bits, no operation lost or applied twice, and what is refused.
#include "server/standby_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "base/row_protocol.h"
#include "net/rpc.h"
#include "net/test_support.h"
#include "server/parameter_server.h"

namespace persia::server {
namespace {

using net::Channel;
using net::testing::In;
using net::testing::Loopback;
using net::testing::Soon;

constexpr uint32_t kDim = 4;

// With few rows of capacity, so that the order of operations decides which rows are evicted.
std::unique_ptr<ParameterServer> MakeReplica(bool is_standby, uint16_t* port) {
  ParameterServer::Options options;
  options.store = {.capacity = 200, .num_internal_shards = 2};
  options.rpc.num_handler_threads = 4;
  options.has_standby = true;
  options.is_standby = is_standby;
  auto server = ParameterServer::Create(options);
  EXPECT_TRUE(server.ok());
  *port = server.value()->Start().value();
  return std::move(server).value();
}

class StandbyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    primary_ = MakeReplica(false, &primary_port_);
    standby_ = MakeReplica(true, &standby_port_);
    ASSERT_TRUE(primary_->standby()->Attach(Loopback(standby_port_)).ok());
    channel_.SetAddress(Loopback(primary_port_));
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
  ASSERT_TRUE(Configure().ok());
  std::vector<std::thread> workers;
  for (uint64_t worker = 1; worker <= 3; ++worker) {
    workers.emplace_back([this, worker] {
      for (uint64_t step = 1; step <= 60; ++step) Train(worker, step);
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_GT(primary_->metrics()["num_evicted_rows"], 0u);
  primary_->Stop(std::chrono::seconds(1));
  standby_->TakeOver();
  EXPECT_EQ(RowsOf(*standby_), RowsOf(*primary_));
  EXPECT_EQ(standby_->metrics()["num_updates"], 180u);
}

TEST_F(StandbyTest, AnUpdateThatIsRepeatedAfterTheTakeOverIsNotAppliedAgain) {
  ASSERT_TRUE(Configure().ok());
  const std::vector<uint64_t> signs = {5};
  const std::vector<SignBlock> blocks = {{kDim, 1}};
  const std::vector<float> gradient(kDim, 1.0f);
  ASSERT_TRUE(net::Call(channel_, kLookupRows, {true, {blocks, signs}}, Soon()).ok());
  const UpdateRowsRequest update = {{9, 1}, {}, {blocks, signs}, gradient};
  ASSERT_TRUE(net::Call(channel_, kUpdateRows, update, Soon()).ok());
  const std::vector<float> rows = RowsOf(*primary_);
  primary_.reset();
  standby_->TakeOver();
  channel_.SetAddress(Loopback(standby_port_));
  ASSERT_TRUE(net::Call(channel_, kUpdateRows, update, Soon()).ok());
  EXPECT_EQ(standby_->metrics()["num_repeated_updates"], 1u);
  EXPECT_EQ(RowsOf(*standby_), rows);
}

TEST_F(StandbyTest, RefusesCallersUntilItTakesOver) {
  Channel direct({.peer = "the standby"});
  direct.SetAddress(Loopback(standby_port_));
  const auto refused = net::Call(direct, kCountRows, {}, In(300));
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << refused.status().ToString();
  EXPECT_NE(refused.status().message().find("is a standby"), std::string::npos);
  standby_->TakeOver();
  EXPECT_TRUE(net::Call(direct, kCountRows, {}, Soon()).ok());
  // From now on its former primary is refused, and must not acknowledge what it applies.
  const TrainConfig config;
  const auto status = net::Call(channel_, kConfigureServer, {config, false}, In(1000));
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(primary_->standby()->state(), StandbyLink::State::kBroken);
}

TEST_F(StandbyTest, ALostStandbyHoldsUpdatesUntilItIsReleased) {
  ASSERT_TRUE(Configure().ok());
  standby_.reset();
  std::thread worker([this] { Train(1, 1); });
  while (primary_->standby()->state() != StandbyLink::State::kBroken) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(primary_->metrics()["num_updates"], 0u);
  primary_->standby()->Release();
  worker.join();
  EXPECT_EQ(primary_->metrics()["num_updates"], 1u);
  EXPECT_EQ(primary_->standby()->Attach("127.0.0.1:1").code(), StatusCode::kFailedPrecondition);
}

TEST_F(StandbyTest, RefusesConfigsThatItCannotReplicate) {
  const Status status = Configure(2);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("admit_after"), std::string::npos);
}

TEST(OperationLogTest, WaitsForThePredecessorAndTakesRepetitionsOnce) {
  std::vector<uint8_t> applied;
  OperationLog log(1 << 20, [&](uint8_t method, const Buffer&) { applied.push_back(method); });
  std::thread late([&] { EXPECT_TRUE(log.Add(1, 11, Buffer(8), Soon()).ok()); });
  EXPECT_EQ(log.Add(2, 12, Buffer(8), In(20)).code(), StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(log.Add(0, 10, Buffer(8), Soon()).ok());
  late.join();
  EXPECT_TRUE(log.Add(0, 10, Buffer(8), Soon()).ok());
  log.Finish();
  EXPECT_EQ(applied, (std::vector<uint8_t>{10, 11}));
  EXPECT_EQ(log.Add(2, 12, Buffer(8), Soon()).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(log.Add(1, 11, Buffer(8), Soon()).ok());
}

}  // namespace
}  // namespace persia::server

// Which role may call which method of a parameter server and of an embedding worker: every cell.
//
// The table is written out here a second time, so that a change of the protocol's own column is
// seen.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "client/test_support.h"
#include "net/channel.h"
#include "net/rpc.h"
#include "worker/worker_protocol.h"

namespace persia::client {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

// One letter for each role: Trainer, Loader, Worker, Server, Inference, Monitor, Admin.
const std::map<Role, char> kLetters = {
    {Role::kTrainer, 'T'},   {Role::kLoader, 'L'},  {Role::kWorker, 'W'}, {Role::kServer, 'S'},
    {Role::kInference, 'I'}, {Role::kMonitor, 'M'}, {Role::kAdmin, 'A'}};
using Table = std::map<uint8_t, std::string>;
const Table kServerTable = {{kConfigureServer.number, "WA"}, {kLookupRows.number, "W"},
                            {kUpdateRows.number, "W"},       {kSetRows.number, "WA"},
                            {kClearRows.number, "WA"},       {kCountRows.number, "WMA"},
                            {kPrefetchRows.number, "W"},     {kMeasureLoad.number, "WMA"},
                            {kReplicate.number, "S"},        {kLookupWholeRows.number, "W"}};
const Table kWorkerTable = {
    {worker::kConfigureWorker.number, "TA"}, {worker::kLookupReference.number, "T"},
    {worker::kLookupDirect.number, "TI"},    {worker::kReturnGradients.number, "T"},
    {worker::kReleaseReference.number, "T"}, {worker::kCountEmbeddings.number, "TIMA"},
    {worker::kClearEmbeddings.number, "TA"}, {worker::kSetEmbeddings.number, "TA"},
    {worker::kLookupWhole.number, "T"},      {worker::kReturnInOrder.number, "T"}};

net::RoleKey KeyOf(Role role) {
  net::RoleKey key;
  key.fill(static_cast<std::byte>(role));
  return key;
}

// Accepts every role, so that each comes as far as the methods.
net::Security AcceptsAll(Role role) {
  net::Identity identity{.role = role, .key = KeyOf(role)};
  for (const auto& [accepted, letter] : kLetters) identity.accepted[accepted] = KeyOf(accepted);
  return {.identity = std::make_shared<const net::Identity>(std::move(identity))};
}

// A body of 3 bytes is of no method: who may call is told that it does not decode.
void ExpectTable(uint16_t port, const Table& table) {
  const std::byte body[3] = {};
  Segments segments;
  segments.AddView(body);
  for (const auto& [role, letter] : kLetters) {
    net::Channel channel({.peer = "the server", .security = AcceptsAll(role)});
    channel.SetAddress(Loopback(port));
    for (const auto& [method, permitted] : table) {
      const auto reply = channel.Call({method, "Method"}, segments, Soon());
      const bool may_call = permitted.find(letter) != std::string::npos;
      EXPECT_EQ(reply.code(), may_call ? StatusCode::kCorruption : StatusCode::kPermissionDenied)
          << RoleName(role) << " calls method " << int{method} << ": " << reply.status().ToString();
    }
  }
}

TEST(AccessTest, EveryRoleAndMethodOfAParameterServer) {
  auto server = Must(server::ParameterServer::Create(
      {.store = StoreOptions(), .rpc = {.security = AcceptsAll(Role::kServer)}}));
  ExpectTable(Must(server->Start()), kServerTable);
}

class WorkerAccessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    service_ = std::make_unique<worker::WorkerService>(
        Must(worker::EmbeddingWorker::Create(Slots(), std::make_shared<worker::RemoteRows>(1))),
        net::ServerOptions{.security = AcceptsAll(Role::kWorker)});
    port_ = Must(service_->Start());
  }
  std::unique_ptr<worker::WorkerService> service_;
  uint16_t port_ = 0;
};

TEST_F(WorkerAccessTest, EveryRoleAndMethodOfAnEmbeddingWorker) {
  ExpectTable(port_, kWorkerTable);
}

TEST_F(WorkerAccessTest, InferenceMayNotInsertRows) {
  net::Channel channel({.peer = "the worker", .security = AcceptsAll(Role::kInference)});
  channel.SetAddress(Loopback(port_));
  const std::vector<std::byte> batch = Batch(1);
  worker::LookupDirectRequest request{.options = {.requires_grad = 1}, .id_features = batch};
  const auto reply = net::Call(channel, worker::kLookupDirect, request, Soon());
  EXPECT_EQ(reply.code(), StatusCode::kPermissionDenied) << reply.status().ToString();
}

}  // namespace
}  // namespace persia::client

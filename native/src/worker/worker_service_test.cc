// WorkerService: what it makes of bodies, good and malformed. Whole batches against real servers:
// client/cluster_test.cc.
#include "worker/worker_service.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <type_traits>

#include "base/bytes.h"
#include "base/id_features.h"
#include "base/message_test_util.h"
#include "net/rpc.h"
#include "net/test_support.h"
#include "worker/worker_protocol.h"

namespace persia::worker {
namespace {

using net::Clock;
using net::testing::In;
using net::testing::Loopback;
using net::testing::SegmentsOf;
using net::testing::Soon;
using testing::EncodeToBytes;

// One server, whose rows are all ones and whose updates all succeed.
class OnesRows : public RowService {
 public:
  Placement placement() const override { return {}; }
  Status Configure(const TrainConfig&, bool, Deadline) override { return Status::Ok(); }
  StatusOr<std::vector<ServerRows>> Lookup(const Placement&, std::span<const ServerBlocks> requests,
                                           bool, Deadline) override {
    std::vector<ServerRows> rows(1);
    const uint64_t num_floats = requests[0].num_floats();
    rows[0].storage = Buffer(num_floats * sizeof(float));
    auto* values = reinterpret_cast<float*>(rows[0].storage.data());
    std::fill_n(values, num_floats, 1.0f);
    rows[0].rows = {values, num_floats};
    return rows;
  }
  StatusOr<std::vector<UpdateResult>> Update(const Placement&,
                                             std::span<const UpdateRowsRequest> updates,
                                             Deadline) override {
    return std::vector<UpdateResult>{{3, updates[0].blocks.signs.size(), 1}};
  }
  Status SetRows(const Placement&, std::span<const SetRowsRequest>, Deadline) override {
    return Status::Ok();
  }
  Status Clear(Deadline) override { return Status::Ok(); }
  StatusOr<std::vector<uint64_t>> Sizes(Deadline) override { return std::vector<uint64_t>{17}; }
};

std::vector<std::byte> IdBatch(std::string_view name) {
  const std::vector<uint32_t> offsets = {0, 2, 3};
  const std::vector<uint64_t> ids = {11, 12, 13};
  return EncodeIdFeatures({2, {{name, offsets, ids}}}).value();
}

class WorkerServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    WorkerOptions options;
    options.slots = {{.name = "age", .dim = 2}};
    auto worker = EmbeddingWorker::Create(options, std::make_shared<OnesRows>());
    ASSERT_TRUE(worker.ok()) << worker.status().ToString();
    worker_ = std::move(worker).value();
    service_ = std::make_unique<WorkerService>(worker_, net::Server::Options{});
    auto port = service_->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    channel_.SetAddress(Loopback(*port));
  }

  // The bytes as they are, right or wrong.
  StatusOr<Buffer> Send(const MethodId& method, std::span<const std::byte> body) {
    return channel_.Call(method, SegmentsOf(body), Soon());
  }
  template <typename Request, typename Reply>
  Result<Reply> Call(const Method<Request, Reply>& method, std::type_identity_t<Request> request) {
    return net::Call(channel_, method, std::move(request), Soon());
  }
  BatchKey Register() { return worker_->Register(4, id_features_).value(); }
  GradientsRequest Gradients(const BatchKey& key) const {
    return {key, 1.0f, WireDtype::kFloat32, {gradient_slot_}};
  }

  const std::vector<float> gradient_ = {1, 2, 3, 4};
  const SlotGradient gradient_slot_ = {
      .slot = "age", .num_rows = 2, .dim = 2, .rows = gradient_.data()};
  const std::vector<std::byte> id_features_ = IdBatch("age");
  std::shared_ptr<EmbeddingWorker> worker_;
  std::unique_ptr<WorkerService> service_;
  net::Channel channel_{{.peer = "embedding-worker 0"}};
};

TEST_F(WorkerServiceTest, ABatchFromItsLookupToItsGradients) {
  const BatchKey key = Register();
  auto embeddings = Call(kLookupReference, {key, {1}});
  ASSERT_TRUE(embeddings.ok()) << embeddings.status().ToString();
  BatchKey answered;
  std::memcpy(&answered, embeddings->data(), sizeof(answered));
  EXPECT_EQ(answered.worker_incarnation, worker_->incarnation());
  EXPECT_EQ(answered.reference, key.reference);
  auto report = Call(kReturnGradients, Gradients(key));
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->update.staleness, 3u);
  EXPECT_EQ(report->update.num_updated, 3u);
  EXPECT_EQ(report->update.num_missing, 1u);
  EXPECT_EQ(worker_->metrics()["num_returned"], 1u);
}

TEST_F(WorkerServiceTest, DirectLookupsAndRelease) {
  auto embeddings = Call(kLookupDirect, {{1}, {}, id_features_});
  ASSERT_TRUE(embeddings.ok()) << embeddings.status().ToString();
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 1u);
  BatchKey key;
  std::memcpy(&key, embeddings->data(), sizeof(key));
  const Status released = Call(kReleaseReference, key);
  EXPECT_TRUE(released.ok()) << released.ToString();
  EXPECT_EQ(worker_->metrics()["num_released"], 1u);
}

TEST_F(WorkerServiceTest, AnUnknownFormIsRefused) {
  const Status status = Call(kLookupDirect, {{1, 0, 0, 2}, {}, id_features_}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("form is 2"), std::string::npos) << status.ToString();
}

TEST_F(WorkerServiceTest, WhatConcernsTheServers) {
  EXPECT_TRUE(Call(kConfigureWorker, {TrainConfig(), true}).ok());
  EXPECT_TRUE(Call(kClearEmbeddings, {}).ok());
  auto sizes = Call(kCountEmbeddings, {});
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes.value(), std::vector<uint64_t>{17});
}

TEST_F(WorkerServiceTest, EveryTruncationIsRefusedAndChangesNothing) {
  const BatchKey key = Register();
  const SignBlock block{2, 1};
  const std::vector<uint64_t> signs = {1};
  const std::vector<float> row = {1, 2};
  const std::vector<std::pair<MethodId, std::vector<std::byte>>> bodies = {
      {kConfigureWorker, EncodeToBytes(ConfigureRequest())},
      {kLookupReference, EncodeToBytes(LookupReferenceRequest{key, {1}})},
      {kLookupDirect, EncodeToBytes(LookupDirectRequest{{1}, {}, id_features_})},
      {kReturnGradients, EncodeToBytes(Gradients(key))},
      {kReleaseReference, EncodeToBytes(key)},
      {kSetEmbeddings, EncodeToBytes(SetRowsRequest{{{&block, 1}, signs}, row})},
  };
  for (const auto& [method, body] : bodies) {
    for (size_t size = 0; size < body.size(); ++size) {
      const Status status = Send(method, std::span(body).first(size)).status();
      EXPECT_EQ(status.code(), StatusCode::kCorruption)
          << method.name << " with " << size << " bytes: " << status.ToString();
    }
  }
  const Metrics stats = worker_->metrics();
  EXPECT_EQ(stats["num_registered"], 1u);
  EXPECT_EQ(stats["num_buffered"], 1u);
}

TEST_F(WorkerServiceTest, LeftOverBytesAreRefused) {
  const BatchKey key = Register();
  const auto code = [&](const MethodId& method, std::vector<std::byte> body) {
    body.push_back(std::byte{0});
    return Send(method, body).status().code();
  };
  EXPECT_EQ(code(kCountEmbeddings, {}), StatusCode::kCorruption);
  EXPECT_EQ(code(kClearEmbeddings, {}), StatusCode::kCorruption);
  EXPECT_EQ(code(kReleaseReference, EncodeToBytes(key)), StatusCode::kCorruption);
  EXPECT_EQ(code(kLookupReference, EncodeToBytes(LookupReferenceRequest{key, {1}})),
            StatusCode::kCorruption);
  EXPECT_EQ(code(kReturnGradients, EncodeToBytes(Gradients(key))), StatusCode::kCorruption);
}

TEST_F(WorkerServiceTest, RefusalsKeepTheirCodes) {
  const BatchKey key = Register();
  const BatchKey former{key.worker_incarnation + 1, key.reference};
  EXPECT_EQ(Call(kLookupReference, {former, {1}}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Call(kLookupReference, {key, {2}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Call(kLookupReference, {key, {1, 9}}).status().code(), StatusCode::kInvalidArgument);
  const auto height = IdBatch("height");
  const Status unknown = Call(kLookupDirect, {{}, {}, height}).status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.message().find("height"), std::string::npos) << unknown.message();
}

// The worker gives up a tenth of it earlier than its caller: more than a busy machine keeps a
// thread waiting, or the caller would hear of a silent worker.
constexpr int kLongMs = 5000;

// A service whose only parameter server is at `port`, and what its caller hears of that one.
Status CallWithServerAt(uint16_t port, Clock::time_point deadline) {
  auto rows = std::make_shared<RemoteRows>(1);
  EXPECT_TRUE(rows->SetServer(0, Loopback(port)).ok());
  WorkerOptions options;
  options.slots = {{.name = "age", .dim = 2}};
  WorkerService service(EmbeddingWorker::Create(options, rows).value(), {});
  net::Channel channel({.peer = "embedding-worker 0"});
  channel.SetAddress(Loopback(service.Start().value()));
  const auto id_features = IdBatch("age");
  return net::Call(channel, kLookupDirect, LookupDirectRequest{{}, {}, id_features}, deadline)
      .status();
}

TEST(WorkerServiceErrorTest, ADeadServerIsNamedToTheCaller) {
  const net::testing::ClosedPort port;
  const Status status = CallWithServerAt(port.number(), In(kLongMs));
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  EXPECT_NE(status.message().find("parameter-server 0 at "), std::string::npos) << status.message();
}

TEST(WorkerServiceErrorTest, ASilentServerIsNamedToTheCaller) {
  std::promise<void> done;
  net::Server silent(net::Server::Options{});
  silent.Handle(kLookupRows,
                [ended = done.get_future().share()](const Buffer&, const net::CallContext&) {
                  ended.wait_for(std::chrono::seconds(120));
                  return StatusOr<Segments>(Segments());
                });
  const Status status = CallWithServerAt(silent.Start().value(), In(kLongMs));
  done.set_value();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.ToString();
  EXPECT_NE(status.message().find("parameter-server 0 at "), std::string::npos) << status.message();
}

}  // namespace
}  // namespace persia::worker

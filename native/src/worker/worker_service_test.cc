// WorkerService: what it makes of bodies, good and malformed. Whole batches against real servers:
// client/cluster_test.cc.
#include "worker/worker_service.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>

#include "base/bytes.h"
#include "base/id_features.h"
#include "base/row_protocol.h"
#include "net/channel.h"
#include "net/test_support.h"
#include "worker/gradients_codec.h"
#include "worker/remote_rows.h"
#include "worker/worker_protocol.h"

namespace persia::worker {
namespace {

using net::Clock;
using net::Method;
using net::Parts;
using net::testing::In;
using net::testing::Loopback;
using net::testing::PartsOf;
using net::testing::Soon;

// One server, whose rows are all ones and whose updates all succeed.
class OnesRows : public RowService {
 public:
  uint32_t num_servers() const override { return 1; }
  Status Configure(const TrainConfig&, bool, Deadline) override { return Status::Ok(); }
  StatusOr<std::vector<ServerRows>> Lookup(std::span<const ServerBlocks> requests, bool,
                                           Deadline) override {
    std::vector<ServerRows> rows(1);
    const uint64_t num_floats = requests[0].num_floats();
    rows[0].storage = Buffer(num_floats * sizeof(float));
    auto* values = reinterpret_cast<float*>(rows[0].storage.data());
    std::fill_n(values, num_floats, 1.0f);
    rows[0].rows = {values, num_floats};
    return rows;
  }
  StatusOr<UpdateResult> Update(UpdateKey, std::span<const ServerUpdate> updates,
                                Deadline) override {
    return UpdateResult{3, updates[0].blocks->signs.size(), 1};
  }
  Status SetRows(std::span<const ServerBlocks>, std::span<const std::span<const float>>,
                 Deadline) override {
    return Status::Ok();
  }
  Status Clear(Deadline) override { return Status::Ok(); }
  StatusOr<std::vector<uint64_t>> Sizes(Deadline) override { return std::vector<uint64_t>{17}; }
};

std::vector<std::byte> Join(std::initializer_list<std::vector<std::byte>> pieces) {
  std::vector<std::byte> joined;
  for (const auto& piece : pieces) joined.insert(joined.end(), piece.begin(), piece.end());
  return joined;
}

std::vector<std::byte> Flatten(const Parts& parts) {
  std::vector<std::byte> bytes;
  for (const auto& view : parts.views) bytes.insert(bytes.end(), view.begin(), view.end());
  return bytes;
}

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

  StatusOr<Buffer> Call(Method method, std::span<const std::byte> body) {
    return channel_.Call(method, PartsOf(body), Soon());
  }
  ReferenceBody Register() {
    auto reply =
        Call(Method::kRegisterBatch, Join({EncodeFixed(RegisterBatchHead{4, 0}), IdBatch("age")}));
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    auto reference = DecodeFixed<ReferenceBody>(reply->span(), "reply");
    EXPECT_TRUE(reference.ok());
    return *reference;
  }
  std::vector<std::byte> GradientsBody(const ReferenceBody& reference) const {
    const SlotGradient gradient{.slot = "age", .num_rows = 2, .dim = 2, .rows = gradient_.data()};
    return Flatten(EncodeGradients({reference.worker_incarnation, reference.reference}, 1.0f,
                                   std::span(&gradient, 1)));
  }

  const std::vector<float> gradient_ = {1, 2, 3, 4};
  std::shared_ptr<EmbeddingWorker> worker_;
  std::unique_ptr<WorkerService> service_;
  net::Channel channel_{{.peer = "embedding-worker 0"}};
};

TEST_F(WorkerServiceTest, ABatchFromRegistrationToItsGradients) {
  const ReferenceBody reference = Register();
  EXPECT_EQ(reference.worker_incarnation, worker_->incarnation());
  auto embeddings =
      Call(Method::kLookupReference, EncodeFixed(LookupReferenceBody{reference, 1, 0}));
  ASSERT_TRUE(embeddings.ok()) << embeddings.status().ToString();
  ByteReader reader(std::as_const(*embeddings).span());
  EXPECT_EQ(reader.Get<uint64_t>(), reference.worker_incarnation);
  EXPECT_EQ(reader.Get<uint64_t>(), reference.reference);
  auto report = Call(Method::kReturnGradients, GradientsBody(reference));
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  auto decoded = DecodeReport(report->span());
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->update.staleness, 3u);
  EXPECT_EQ(decoded->update.num_updated, 3u);
  EXPECT_EQ(decoded->update.num_missing, 1u);
  EXPECT_EQ(worker_->stats().num_returned, 1u);
}

TEST_F(WorkerServiceTest, DirectLookupsAndRelease) {
  auto embeddings =
      Call(Method::kLookupDirect, Join({EncodeFixed(LookupDirectHead{1, 0}), IdBatch("age")}));
  ASSERT_TRUE(embeddings.ok()) << embeddings.status().ToString();
  EXPECT_EQ(worker_->stats().num_in_flight, 1u);
  ReferenceBody reference;
  std::memcpy(&reference, embeddings->data(), sizeof(reference));
  auto released = Call(Method::kReleaseReference, EncodeFixed(reference));
  ASSERT_TRUE(released.ok()) << released.status().ToString();
  EXPECT_EQ(released->size(), 0u);
  EXPECT_EQ(worker_->stats().num_released, 1u);
}

TEST_F(WorkerServiceTest, WhatConcernsTheServers) {
  EXPECT_TRUE(Call(Method::kConfigureWorker, EncodeConfigureRequest(TrainConfig(), true)).ok());
  EXPECT_TRUE(Call(Method::kClearEmbeddings, {}).ok());
  auto stats = Call(Method::kWorkerStats, {});
  ASSERT_TRUE(stats.ok());
  EXPECT_TRUE(
      std::ranges::equal(std::as_const(*stats).span(),
                         Join({EncodeFixed(WorkerStatsHead{1, 0}), EncodeFixed(uint64_t{17})})));
}

TEST_F(WorkerServiceTest, EveryTruncationIsRefusedAndChangesNothing) {
  const ReferenceBody reference = Register();
  const std::vector<RowBlockHeader> blocks = {{2, 1}};
  const std::vector<std::byte> signs_and_rows(8 + 8);
  const std::vector<std::pair<Method, std::vector<std::byte>>> bodies = {
      {Method::kConfigureWorker, EncodeConfigureRequest(TrainConfig(), false)},
      {Method::kRegisterBatch, Join({EncodeFixed(RegisterBatchHead{4, 0}), IdBatch("age")})},
      {Method::kLookupReference, EncodeFixed(LookupReferenceBody{reference, 1, 0})},
      {Method::kLookupDirect, Join({EncodeFixed(LookupDirectHead{1, 0}), IdBatch("age")})},
      {Method::kReturnGradients, GradientsBody(reference)},
      {Method::kReleaseReference, EncodeFixed(reference)},
      {Method::kSetEmbeddings, Join({EncodeSetRowsHead(blocks), signs_and_rows})},
  };
  for (const auto& [method, body] : bodies) {
    for (size_t size = 0; size < body.size(); ++size) {
      const Status status = Call(method, std::span(body).first(size)).status();
      EXPECT_EQ(status.code(), StatusCode::kCorruption)
          << net::MethodName(method) << " with " << size << " bytes: " << status.ToString();
    }
  }
  const WorkerStats stats = worker_->stats();
  EXPECT_EQ(stats.num_registered, 1u);
  EXPECT_EQ(stats.num_buffered, 1u);
}

TEST_F(WorkerServiceTest, LeftOverBytesAreRefused) {
  const std::vector<std::byte> one(1);
  const ReferenceBody reference = Register();
  const auto longer = [&](std::vector<std::byte> body) { return Join({std::move(body), one}); };
  const auto code = [&](Method method, std::vector<std::byte> body) {
    return Call(method, body).status().code();
  };
  EXPECT_EQ(code(Method::kWorkerStats, one), StatusCode::kCorruption);
  EXPECT_EQ(code(Method::kClearEmbeddings, one), StatusCode::kCorruption);
  EXPECT_EQ(code(Method::kReleaseReference, longer(EncodeFixed(reference))),
            StatusCode::kCorruption);
  EXPECT_EQ(
      code(Method::kLookupReference, longer(EncodeFixed(LookupReferenceBody{reference, 1, 0}))),
      StatusCode::kCorruption);
  EXPECT_EQ(code(Method::kReturnGradients, longer(GradientsBody(reference))),
            StatusCode::kCorruption);
}

TEST_F(WorkerServiceTest, RefusalsKeepTheirCodes) {
  const ReferenceBody reference = Register();
  const ReferenceBody former{reference.worker_incarnation + 1, reference.reference};
  EXPECT_EQ(Call(Method::kLookupReference, EncodeFixed(LookupReferenceBody{former, 1, 0}))
                .status()
                .code(),
            StatusCode::kNotFound);
  EXPECT_EQ(Call(Method::kLookupReference, EncodeFixed(LookupReferenceBody{reference, 2, 0}))
                .status()
                .code(),
            StatusCode::kInvalidArgument);
  const Status unknown =
      Call(Method::kLookupDirect, Join({EncodeFixed(LookupDirectHead{0, 0}), IdBatch("height")}))
          .status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.message().find("height"), std::string::npos) << unknown.message();
}

// A service whose only parameter server is at `port`, and what its caller hears of that one.
Status CallWithServerAt(uint16_t port, Clock::time_point deadline) {
  auto rows = std::make_shared<RemoteRows>(1);
  EXPECT_TRUE(rows->SetServer(0, Loopback(port)).ok());
  WorkerOptions options;
  options.slots = {{.name = "age", .dim = 2}};
  WorkerService service(EmbeddingWorker::Create(options, rows).value(), {});
  net::Channel channel({.peer = "embedding-worker 0"});
  channel.SetAddress(Loopback(service.Start().value()));
  const auto body = Join({EncodeFixed(LookupDirectHead{0, 0}), IdBatch("age")});
  return channel.Call(Method::kLookupDirect, PartsOf(body), deadline).status();
}

TEST(WorkerServiceErrorTest, ADeadServerIsNamedToTheCaller) {
  net::Server listener(net::Server::Options{});
  const uint16_t port = listener.Start().value();
  listener.Stop();
  const Status status = CallWithServerAt(port, In(1000));
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
  EXPECT_NE(status.message().find("parameter-server 0 at "), std::string::npos) << status.message();
}

TEST(WorkerServiceErrorTest, ASilentServerIsNamedToTheCaller) {
  std::promise<void> done;
  net::Server silent(net::Server::Options{});
  silent.Handle(Method::kLookupRows,
                [ended = done.get_future().share()](const Buffer&, const net::CallContext&) {
                  ended.wait_for(std::chrono::seconds(30));
                  return StatusOr<Parts>(Parts());
                });
  const Status status = CallWithServerAt(silent.Start().value(), In(1000));
  done.set_value();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.ToString();
  EXPECT_NE(status.message().find("parameter-server 0 at "), std::string::npos) << status.message();
}

}  // namespace
}  // namespace persia::worker

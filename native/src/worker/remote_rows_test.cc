// RemoteRows against servers that answer whatever a test wants. Real parameter servers stand above
// this layer: client/cluster_test.cc has them.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "base/row_protocol.h"
#include "net/test_support.h"
#include "worker/row_service.h"

namespace persia::worker {
namespace {

using net::CallContext;
using net::testing::FailureOf;
using net::testing::Soon;

using Answer = std::function<StatusOr<Segments>(const Buffer& request)>;

StatusOr<Segments> Bytes(size_t size) { return EncodeMessage(std::vector<uint8_t>(size)); }

// A lookup's answer: incarnation, counter, and rows of all `value`.
StatusOr<Segments> Rows(uint64_t incarnation, size_t num_floats, float value) {
  ServerRows answer;
  answer.stamp = {incarnation, 5};
  answer.storage = Buffer(num_floats * sizeof(float));
  auto* rows = reinterpret_cast<float*>(answer.storage.data());
  std::fill_n(rows, num_floats, value);
  answer.rows = {rows, num_floats};
  return EncodeMessage(std::move(answer));
}

StatusOr<Segments> IsWanted(bool is_wanted) {
  return EncodeMessage(PrefetchRowsReply{is_wanted ? 1u : 0u});
}

class RemoteRowsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kNumServers = 3;

  std::atomic<size_t> num_signs_ = 0;  // in hints; before the servers, whose handlers count here

  void SetUp() override {
    for (uint32_t i = 0; i < kNumServers; ++i) StartServer(i);
  }
  void StartServer(uint32_t index) {
    servers_[index] = std::make_unique<net::Server>(net::Server::Options{});
    for (const MethodId& method :
         std::vector<MethodId>{kConfigureServer, kLookupRows, kUpdateRows, kSetRows, kClearRows,
                               kCountRows, kPrefetchRows, kMeasureLoad}) {
      servers_[index]->Handle(method, [this, index](const Buffer& request, const CallContext&) {
        ++num_calls_[index];
        return answers_[index](request);
      });
    }
    auto port = servers_[index]->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    addresses_[index] = net::testing::Loopback(*port);
    ASSERT_TRUE(rows_.SetServer(index, addresses_[index]).ok());
  }
  void AnswerAll(const Answer& answer) { answers_.fill(answer); }

  // Two floats each of servers 0 and 2; nothing of server 1.
  const std::vector<ServerBlocks> requests_ = {{{{2, 1}}, {7}}, {}, {{{1, 2}}, {8, 9}}};
  const std::vector<float> gradients_ = {0.5f, 0.5f};
  const std::vector<UpdateRowsRequest> updates_ = {
      {{1, 2}, {1, 1}, requests_[0].view(), gradients_},
      {{1, 2}, {0, 0}, requests_[1].view(), {}},
      {{1, 2}, {3, 1}, requests_[2].view(), gradients_}};

  std::array<Answer, kNumServers> answers_;
  std::array<std::atomic<int>, kNumServers> num_calls_{};
  std::array<std::string, kNumServers> addresses_;
  RemoteRows rows_{kNumServers};
  std::array<std::unique_ptr<net::Server>, kNumServers> servers_;
};

TEST_F(RemoteRowsTest, LookupPutsEachAnswerAtItsServer) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [i](const Buffer&) { return Rows(100 + i, 2, static_cast<float>(i)); };
  }
  auto rows = rows_.Lookup(kNumServers, requests_, true, Soon());
  ASSERT_TRUE(rows.ok()) << rows.status().ToString();
  ASSERT_EQ(rows->size(), kNumServers);
  const ServerRows& last = rows.value()[2];
  EXPECT_EQ(last.stamp.incarnation, 102u);
  EXPECT_EQ(last.stamp.update_counter, 5u);
  EXPECT_EQ(std::vector<float>(last.rows.begin(), last.rows.end()), (std::vector<float>{2, 2}));
  EXPECT_TRUE(rows.value()[1].rows.empty());
}

// As many servers, but with other rows: what is routed by the placement of before fails.
TEST_F(RemoteRowsTest, RefusesWhatIsRoutedByTheServersOfBefore) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  const std::vector<MovedShard> moved = {{5, 1}};
  const Placement placement = Placement::Create(kNumServers, 1, moved).value();
  rows_.ReplaceServers(placement, addresses_);
  EXPECT_EQ(rows_.placement(), placement);
  EXPECT_EQ(rows_.Lookup(kNumServers, requests_, true, Soon()).status().code(),
            StatusCode::kUnavailable);
  EXPECT_TRUE(rows_.Lookup(placement, requests_, true, Soon()).ok());
  // Another generation of the same placement.
  EXPECT_EQ(rows_.Lookup(Placement::Create(kNumServers, 2, moved).value(), requests_, true, Soon())
                .status()
                .code(),
            StatusCode::kUnavailable);
}

TEST_F(RemoteRowsTest, AServerWithoutSignsIsNotCalled) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  ASSERT_TRUE(rows_.Lookup(kNumServers, requests_, false, Soon()).ok());
  AnswerAll([](const Buffer&) { return Bytes(sizeof(UpdateResult)); });
  ASSERT_TRUE(rows_.Update(kNumServers, updates_, Soon()).ok());
  AnswerAll([](const Buffer&) { return Bytes(0); });
  const std::vector<SetRowsRequest> sets = {
      {requests_[0].view(), gradients_}, {}, {requests_[2].view(), gradients_}};
  ASSERT_TRUE(rows_.SetRows(kNumServers, sets, Soon()).ok());
  EXPECT_EQ(num_calls_[0], 3);
  EXPECT_EQ(num_calls_[1], 0);
  EXPECT_EQ(num_calls_[2], 3);
}

// Those for server 2 are not sent.
TEST_F(RemoteRowsTest, OnlyServersThatWantToAreToldOfLookupsToCome) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [this, i](const Buffer& request) -> StatusOr<Segments> {
      auto signs = DecodeMessage<std::span<const uint64_t>>(request.span());
      if (!signs.ok()) return signs.status();
      num_signs_ += signs->size();
      return IsWanted(i == 0);
    };
  }
  EXPECT_FALSE(rows_.WantsPrefetch());  // not known yet; asks
  const auto deadline = Soon();
  while (!rows_.WantsPrefetch() || num_calls_[1] == 0 || num_calls_[2] == 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  const HintReport report = rows_.Prefetch(kNumServers, requests_);
  EXPECT_EQ(report.num_signs, 1u);
  EXPECT_EQ(report.num_dropped, 0u);
  while (num_signs_ == 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_EQ(num_signs_, 1u);
  EXPECT_EQ(num_calls_[0], 2);
  EXPECT_EQ(num_calls_[1], 1);
  EXPECT_EQ(num_calls_[2], 1);
}

TEST_F(RemoteRowsTest, WhatAServerDoesNotTakeInIsDropped) {
  std::promise<void> may_go_on;
  const std::shared_future<void> gate = may_go_on.get_future().share();
  AnswerAll([gate](const Buffer& request) {
    if (!request.span().empty()) gate.wait();
    return IsWanted(true);
  });
  const auto deadline = Soon();
  while (!rows_.WantsPrefetch()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  const std::vector<ServerBlocks> one = {requests_[0], {}, {}};
  uint64_t num_dropped = 0;
  while (num_dropped == 0 && std::chrono::steady_clock::now() < deadline) {
    // Nothing until server 0 has said that it wants it.
    num_dropped = rows_.Prefetch(kNumServers, one).num_dropped;
  }
  EXPECT_EQ(num_dropped, 1u);
  may_go_on.set_value();
}

TEST_F(RemoteRowsTest, UpdatesAreSentWholeAndAnsweredByServer) {
  AnswerAll([](const Buffer& request) -> StatusOr<Segments> {
    auto update = UpdateRowsRequest::Decode(request.span());
    if (!update.ok()) return update.status();
    return EncodeMessage(UpdateResult{update->lookup.incarnation, update->blocks.signs.size(),
                                      update->key.reference});
  });
  auto results = rows_.Update(kNumServers, updates_, Soon());
  ASSERT_TRUE(results.ok()) << results.status().ToString();
  ASSERT_EQ(results->size(), kNumServers);
  EXPECT_EQ(results.value()[0].staleness, 1u);
  EXPECT_EQ(results.value()[0].num_updated, 1u);
  EXPECT_EQ(results.value()[1].num_missing, 0u);  // not called
  EXPECT_EQ(results.value()[2].staleness, 3u);
  EXPECT_EQ(results.value()[2].num_updated, 2u);
  EXPECT_EQ(results.value()[2].num_missing, 2u);
}

// One row more or less than was asked for would shift all that follow.
TEST_F(RemoteRowsTest, ALookupsReplyHasTheRowsThatWereAskedFor) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  for (const size_t num_floats : {0u, 1u, 3u}) {
    answers_[2] = [num_floats](const Buffer&) { return Rows(1, num_floats, 0.0f); };
    const Status status = rows_.Lookup(kNumServers, requests_, true, Soon()).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << num_floats;
    EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
  }
}

TEST_F(RemoteRowsTest, AMalformedReplyNamesItsServer) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  for (const size_t size : {0u, 8u, 16u, 20u, 32u}) {
    answers_[2] = [size](const Buffer&) { return Bytes(size); };
    const Status status = rows_.Lookup(kNumServers, requests_, true, Soon()).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << size;
    EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
    EXPECT_EQ(rows_.Update(kNumServers, updates_, Soon()).status().code(), StatusCode::kCorruption);
  }
  AnswerAll([](const Buffer&) { return Bytes(4); });
  EXPECT_EQ(rows_.Configure(TrainConfig(), false, Soon()).code(), StatusCode::kCorruption);
  EXPECT_EQ(rows_.Clear(Soon()).code(), StatusCode::kCorruption);
  EXPECT_EQ(rows_.Sizes(Soon()).status().code(), StatusCode::kCorruption);
}

TEST_F(RemoteRowsTest, LoadsAreEachServersOwnAndNeedAll) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [i](const Buffer&) {
      return EncodeMessage(ServerLoad{i, 10 + i, 20 + i, 30 + i});
    };
  }
  auto loads = rows_.Loads(Soon());
  ASSERT_TRUE(loads.ok()) << loads.status().ToString();
  ASSERT_EQ(loads->size(), kNumServers);
  EXPECT_EQ(loads.value()[2].num_rows, 2u);
  EXPECT_EQ(loads.value()[2].num_updated_rows, 32u);
  answers_[1] = [](const Buffer&) { return Bytes(8); };
  EXPECT_EQ(rows_.Loads(Soon()).status().code(), StatusCode::kCorruption);
}

TEST_F(RemoteRowsTest, SizesAreEachServersOwn) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [i](const Buffer&) -> StatusOr<Segments> {
      return EncodeMessage(uint64_t{10 + i});
    };
  }
  auto sizes = rows_.Sizes(Soon());
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes.value(), (std::vector<uint64_t>{10, 11, 12}));
}

TEST_F(RemoteRowsTest, AServerToBeConfiguredGoesBeforeOtherFailures) {
  answers_[0] = [](const Buffer&) -> StatusOr<Segments> { return Internal("first"); };
  answers_[2] = [](const Buffer&) -> StatusOr<Segments> { return FailedPrecondition("not yet"); };
  const Status status = rows_.Lookup(kNumServers, requests_, true, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
  answers_[2] = [](const Buffer&) -> StatusOr<Segments> { return InvalidArgument("second"); };
  EXPECT_EQ(rows_.Lookup(kNumServers, requests_, true, Soon()).status().code(),
            StatusCode::kInternal);
}

TEST_F(RemoteRowsTest, AServerThatComesBackElsewhereIsFoundAgain) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  ASSERT_TRUE(rows_.Lookup(kNumServers, requests_, true, Soon()).ok());
  servers_[2].reset();
  StartServer(2);
  EXPECT_TRUE(rows_.Lookup(kNumServers, requests_, true, Soon()).ok());
}

TEST_F(RemoteRowsTest, AServerThatIsAwayIsNamedAtTheDeadline) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  servers_[2].reset();
  // Server 0 must have answered by the deadline, or it is the one that is named.
  const auto call = [&](auto deadline) {
    return rows_.Lookup(kNumServers, requests_, true, deadline).status();
  };
  const Status status = FailureOf(call, "parameter-server 2", 100);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
}

TEST_F(RemoteRowsTest, ThereIsNoServerPastTheLast) {
  EXPECT_EQ(rows_.SetServer(kNumServers, "127.0.0.1:1").code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace persia::worker

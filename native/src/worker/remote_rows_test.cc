// RemoteRows against servers that answer whatever a test wants. Real parameter servers stand above
// this layer: client/cluster_test.cc has them.
#include "worker/remote_rows.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "base/row_protocol.h"
#include "net/test_support.h"

namespace persia::worker {
namespace {

using net::CallContext;
using net::Method;
using net::Parts;
using net::testing::In;
using net::testing::Soon;

using Answer = std::function<StatusOr<Parts>(const Buffer& request)>;

StatusOr<Parts> Bytes(size_t size) {
  Parts parts;
  parts.AddOwned(std::vector<std::byte>(size));
  return parts;
}

// A lookup's answer: incarnation, counter, and rows of all `value`.
StatusOr<Parts> Rows(uint64_t incarnation, size_t num_floats, float value) {
  const LookupRowsReply head{incarnation, 5};
  std::vector<std::byte> bytes(sizeof(head) + (num_floats * sizeof(float) + 7) / 8 * 8);
  std::memcpy(bytes.data(), &head, sizeof(head));
  const std::vector<float> rows(num_floats, value);
  std::memcpy(bytes.data() + sizeof(head), rows.data(), num_floats * sizeof(float));
  Parts parts;
  parts.AddOwned(std::move(bytes));
  return parts;
}

StatusOr<Parts> IsWanted(bool is_wanted) {
  const PrefetchRowsReply reply{is_wanted ? 1u : 0u};
  const auto bytes = std::as_bytes(std::span(&reply, 1));
  Parts parts;
  parts.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
  return parts;
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
    for (const Method method :
         {Method::kConfigureServer, Method::kLookupRows, Method::kUpdateRows, Method::kSetRows,
          Method::kClearRows, Method::kCountRows, Method::kPrefetchRows}) {
      servers_[index]->Handle(method, [this, index](const Buffer& request, const CallContext&) {
        ++num_calls_[index];
        return answers_[index](request);
      });
    }
    auto port = servers_[index]->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    ASSERT_TRUE(rows_.SetServer(index, net::testing::Loopback(*port)).ok());
  }
  void AnswerAll(const Answer& answer) { answers_.fill(answer); }

  // Two floats each of servers 0 and 2; nothing of server 1.
  const std::vector<ServerBlocks> requests_ = {{{{2, 1}}, {7}}, {}, {{{1, 2}}, {8, 9}}};
  const std::vector<float> gradients_ = {0.5f, 0.5f};
  const std::vector<ServerUpdate> updates_ = {{&requests_[0], gradients_, 1, 1},
                                              {&requests_[1], {}, 0, 0},
                                              {&requests_[2], gradients_, 3, 1}};

  std::array<Answer, kNumServers> answers_;
  std::array<std::atomic<int>, kNumServers> num_calls_{};
  RemoteRows rows_{kNumServers};
  std::array<std::unique_ptr<net::Server>, kNumServers> servers_;
};

TEST_F(RemoteRowsTest, LookupPutsEachAnswerAtItsServer) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [i](const Buffer&) { return Rows(100 + i, 2, static_cast<float>(i)); };
  }
  auto rows = rows_.Lookup(requests_, true, Soon());
  ASSERT_TRUE(rows.ok()) << rows.status().ToString();
  ASSERT_EQ(rows->size(), kNumServers);
  const ServerRows& last = rows.value()[2];
  EXPECT_EQ(last.incarnation, 102u);
  EXPECT_EQ(last.update_counter, 5u);
  EXPECT_EQ(std::vector<float>(last.rows.begin(), last.rows.end()), (std::vector<float>{2, 2}));
  EXPECT_TRUE(rows.value()[1].rows.empty());
}

TEST_F(RemoteRowsTest, AServerWithoutSignsIsNotCalled) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  ASSERT_TRUE(rows_.Lookup(requests_, false, Soon()).ok());
  AnswerAll([](const Buffer&) { return Bytes(sizeof(UpdateRowsReply)); });
  ASSERT_TRUE(rows_.Update({1, 2}, updates_, Soon()).ok());
  AnswerAll([](const Buffer&) { return Bytes(0); });
  const std::vector<std::span<const float>> values = {gradients_, {}, gradients_};
  ASSERT_TRUE(rows_.SetRows(requests_, values, Soon()).ok());
  EXPECT_EQ(num_calls_[0], 3);
  EXPECT_EQ(num_calls_[1], 0);
  EXPECT_EQ(num_calls_[2], 3);
}

// Those for server 2 are not sent.
TEST_F(RemoteRowsTest, OnlyServersThatWantToAreToldOfLookupsToCome) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [this, i](const Buffer& request) -> StatusOr<Parts> {
      auto hint = DecodePrefetchRequest(request.span());
      if (!hint.ok()) return hint.status();
      num_signs_ += hint->signs.size();
      return IsWanted(i == 0);
    };
  }
  EXPECT_FALSE(rows_.WantsPrefetch());  // not known yet; asks
  const auto deadline = Soon();
  while (!rows_.WantsPrefetch() || num_calls_[1] == 0 || num_calls_[2] == 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  const Announced announced = rows_.Prefetch(requests_);
  EXPECT_EQ(announced.num_signs, 1u);
  EXPECT_EQ(announced.num_dropped, 0u);
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
    num_dropped = rows_.Prefetch(one).num_dropped;
  }
  EXPECT_EQ(num_dropped, 1u);
  may_go_on.set_value();
}

TEST_F(RemoteRowsTest, UpdatesAreSentWholeAndAddedUp) {
  AnswerAll([](const Buffer& request) -> StatusOr<Parts> {
    auto update = DecodeUpdateRequest(request.span());
    if (!update.ok()) return update.status();
    const UpdateRowsReply reply{update->key.lookup_incarnation, update->blocks.signs.size(), 1};
    const auto bytes = std::as_bytes(std::span(&reply, 1));
    Parts parts;
    parts.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
    return parts;
  });
  auto result = rows_.Update({1, 2}, updates_, Soon());
  ASSERT_TRUE(result.ok()) << result.status().ToString();
  EXPECT_EQ(result->staleness, 3u);  // the largest
  EXPECT_EQ(result->num_updated, 3u);
  EXPECT_EQ(result->num_missing, 2u);
}

TEST_F(RemoteRowsTest, AMalformedReplyNamesItsServer) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  for (const size_t size : {0u, 8u, 16u, 20u, 32u}) {
    answers_[2] = [size](const Buffer&) { return Bytes(size); };
    const Status status = rows_.Lookup(requests_, true, Soon()).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << size;
    EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
    EXPECT_EQ(rows_.Update({1, 2}, updates_, Soon()).status().code(), StatusCode::kCorruption);
  }
  AnswerAll([](const Buffer&) { return Bytes(4); });
  EXPECT_EQ(rows_.Configure(TrainConfig(), false, Soon()).code(), StatusCode::kCorruption);
  EXPECT_EQ(rows_.Clear(Soon()).code(), StatusCode::kCorruption);
  EXPECT_EQ(rows_.Sizes(Soon()).status().code(), StatusCode::kCorruption);
}

TEST_F(RemoteRowsTest, SizesAreEachServersOwn) {
  for (uint32_t i = 0; i < kNumServers; ++i) {
    answers_[i] = [i](const Buffer&) -> StatusOr<Parts> {
      std::vector<std::byte> bytes(8);
      bytes[0] = static_cast<std::byte>(10 + i);
      Parts parts;
      parts.AddOwned(std::move(bytes));
      return parts;
    };
  }
  auto sizes = rows_.Sizes(Soon());
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes.value(), (std::vector<uint64_t>{10, 11, 12}));
}

TEST_F(RemoteRowsTest, AServerToBeConfiguredGoesBeforeOtherFailures) {
  answers_[0] = [](const Buffer&) -> StatusOr<Parts> { return Internal("first"); };
  answers_[2] = [](const Buffer&) -> StatusOr<Parts> { return FailedPrecondition("not yet"); };
  const Status status = rows_.Lookup(requests_, true, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
  answers_[2] = [](const Buffer&) -> StatusOr<Parts> { return InvalidArgument("second"); };
  EXPECT_EQ(rows_.Lookup(requests_, true, Soon()).status().code(), StatusCode::kInternal);
}

TEST_F(RemoteRowsTest, AServerThatComesBackElsewhereIsFoundAgain) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  ASSERT_TRUE(rows_.Lookup(requests_, true, Soon()).ok());
  servers_[2].reset();
  StartServer(2);
  EXPECT_TRUE(rows_.Lookup(requests_, true, Soon()).ok());
}

TEST_F(RemoteRowsTest, AServerThatIsAwayIsNamedAtTheDeadline) {
  AnswerAll([](const Buffer&) { return Rows(1, 2, 0.0f); });
  servers_[2].reset();
  const Status status = rows_.Lookup(requests_, true, In(100)).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("parameter-server 2"), std::string::npos) << status.message();
}

TEST_F(RemoteRowsTest, ThereIsNoServerPastTheLast) {
  EXPECT_EQ(rows_.SetServer(kNumServers, "127.0.0.1:1").code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace persia::worker

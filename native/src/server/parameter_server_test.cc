#include "server/parameter_server.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <limits>
#include <thread>
#include <vector>

#include "base/row_protocol.h"
#include "net/channel.h"
#include "net/test_support.h"

namespace persia::server {
namespace {

using net::Channel;
using net::Method;
using net::Parts;
using net::testing::In;
using net::testing::Soon;

struct Rows {
  LookupRowsReply head;
  std::vector<float> values;
};

const std::vector<RowBlockHeader> kBlocks = {{4, 2}, {3, 1}};
const std::vector<uint64_t> kSigns = {101, 202, 303};
constexpr size_t kNumFloats = 4 * 2 + 3;

// A server on a free port and a client that speaks its methods.
class ParameterServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ParameterServer::Options options;
    options.replica_index = 1;
    options.replica_size = 3;
    options.store.capacity = 1000;
    options.store.num_internal_shards = 4;
    options.rpc.num_handler_threads = 4;
    options.rpc.max_body_bytes = 1 << 20;
    auto server = ParameterServer::Create(options);
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(server).value();
    auto port = server_->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    channel_.SetAddress(net::testing::Loopback(*port));
  }

  // SGD with lr 0.5: an update with gradient g takes 0.5 g from a row.
  static TrainConfig Config(float lr = 0.5f) {
    TrainConfig config;
    config.optimizer.kind = OptimizerKind::kSgd;
    config.optimizer.lr = lr;
    return config;
  }
  Status Configure(const TrainConfig& config, uint8_t replace = 0) {
    std::vector<std::byte> body(8);
    body[0] = static_cast<std::byte>(replace);
    const auto encoded = config.Encode();
    body.insert(body.end(), encoded.begin(), encoded.end());
    return Call(Method::kConfigureServer, body).status();
  }
  StatusOr<Buffer> Call(Method method, std::span<const std::byte> body) {
    return channel_.Call(method, net::testing::PartsOf(body), Soon());
  }
  StatusOr<Rows> Lookup(bool train) {
    Parts parts;
    parts.AddOwned(EncodeLookupHead(train, kBlocks));
    parts.AddView(std::as_bytes(std::span(kSigns)));
    auto reply = channel_.Call(Method::kLookupRows, parts, Soon());
    if (!reply.ok()) return reply.status();
    std::span<const float> values;
    auto head = DecodeLookupReply(reply->span(), kNumFloats, &values);
    if (!head.ok()) return head.status();
    return Rows{*head, {values.begin(), values.end()}};
  }
  static Parts WithRows(std::vector<std::byte> head, std::span<const float> values) {
    Parts parts;
    parts.AddOwned(std::move(head));
    parts.AddView(std::as_bytes(std::span(kSigns)));
    parts.AddView(std::as_bytes(values));
    parts.AddView(ArrayPadding(values.size_bytes()));
    return parts;
  }
  StatusOr<UpdateRowsReply> Update(const UpdateRowsKey& key, std::span<const float> gradients) {
    auto reply = channel_.Call(Method::kUpdateRows,
                               WithRows(EncodeUpdateHead(key, kBlocks), gradients), Soon());
    if (!reply.ok()) return reply.status();
    return DecodeUpdateReply(reply->span());
  }
  static std::vector<std::byte> Flatten(const Parts& parts) {
    std::vector<std::byte> bytes;
    for (const auto& view : parts.views) bytes.insert(bytes.end(), view.begin(), view.end());
    return bytes;
  }

  const std::vector<float> ones_ = std::vector<float>(kNumFloats, 1.0f);
  std::unique_ptr<ParameterServer> server_;
  Channel channel_{{.peer = "parameter-server 1"}};
};

TEST_F(ParameterServerTest, PingTellsWhoAnswers) {
  auto reply = Call(Method::kPing, {});
  ASSERT_TRUE(reply.ok());
  auto ping = DecodePingReply(reply->span());
  ASSERT_TRUE(ping.ok());
  EXPECT_NE(ping->incarnation, 0u);
  EXPECT_EQ(ping->incarnation, server_->incarnation());
  EXPECT_EQ(ping->replica_index, 1u);
  EXPECT_EQ(ping->replica_size, 3u);
}

TEST_F(ParameterServerTest, ReplicaIndexMustBeBelowTheSize) {
  ParameterServer::Options options;
  options.replica_index = 3;
  options.replica_size = 3;
  EXPECT_EQ(ParameterServer::Create(options).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(ParameterServerTest, TrainingBeforeConfigureIsFailedPrecondition) {
  EXPECT_EQ(Lookup(true).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Update({1, 1, 0, 0}, ones_).status().code(), StatusCode::kFailedPrecondition);
  auto inference = Lookup(false);
  ASSERT_TRUE(inference.ok());
  EXPECT_EQ(inference->values, std::vector<float>(kNumFloats, 0.0f));
  // The refused update was not remembered as applied.
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  auto update = Update({1, 1, 0, 0}, ones_);
  ASSERT_TRUE(update.ok()) << update.status().ToString();
  EXPECT_EQ(update->num_updated, 3u);
}

TEST_F(ParameterServerTest, LookupUpdateRoundTrip) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto before = Lookup(true);
  ASSERT_TRUE(before.ok()) << before.status().ToString();
  EXPECT_EQ(before->head.incarnation, server_->incarnation());
  EXPECT_EQ(before->head.update_counter, 0u);
  auto update = Update({9, 1, before->head.incarnation, 0}, ones_);
  ASSERT_TRUE(update.ok()) << update.status().ToString();
  EXPECT_EQ(update->staleness, 0u);
  EXPECT_EQ(update->num_updated, 3u);
  EXPECT_EQ(update->num_missing, 0u);
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->head.update_counter, 1u);
  for (size_t i = 0; i < kNumFloats; ++i) {
    EXPECT_FLOAT_EQ(after->values[i], before->values[i] - 0.5f) << i;
  }
}

// Blocks of one dim that follow one another are looked up together; their rows lie as they were
// asked for.
TEST_F(ParameterServerTest, RowsOfBlocksOfOneDimLieInTheirOrder) {
  ASSERT_TRUE(Configure(Config()).ok());
  const std::vector<uint64_t> signs = {11, 12, 13, 14, 15, 16};
  const auto lookup = [&](const std::vector<RowBlockHeader>& blocks,
                          std::span<const uint64_t> of) -> std::vector<float> {
    Parts parts;
    parts.AddOwned(EncodeLookupHead(true, blocks));
    parts.AddView(std::as_bytes(of));
    size_t num_floats = 0;
    for (const RowBlockHeader& block : blocks) num_floats += size_t{block.dim} * block.num_signs;
    auto reply = channel_.Call(Method::kLookupRows, parts, Soon());
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    std::span<const float> values;
    if (!reply.ok()) return {};
    EXPECT_TRUE(DecodeLookupReply(reply->span(), num_floats, &values).ok());
    return {values.begin(), values.end()};
  };
  const std::vector<float> all = lookup({{4, 2}, {4, 0}, {4, 1}, {3, 1}, {4, 2}}, signs);
  std::vector<float> one_by_one;
  for (size_t i = 0; i < signs.size(); ++i) {
    const std::vector<float> row = lookup({{i == 3 ? 3u : 4u, 1}}, std::span(signs).subspan(i, 1));
    one_by_one.insert(one_by_one.end(), row.begin(), row.end());
  }
  EXPECT_EQ(all, one_by_one);
  EXPECT_EQ(all.size(), 5u * 4 + 3);
}

TEST_F(ParameterServerTest, RepeatedKeyIsAppliedOnce) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto before = Lookup(true);
  ASSERT_TRUE(before.ok());
  for (int i = 0; i < 3; ++i) {
    auto update = Update({9, 1, before->head.incarnation, 0}, ones_);
    ASSERT_TRUE(update.ok());
    EXPECT_EQ(update->num_updated, 3u);
  }
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_FLOAT_EQ(after->values[0], before->values[0] - 0.5f);
  EXPECT_EQ(server_->stats().num_updates, 1u);
  EXPECT_EQ(server_->stats().num_repeated_updates, 2u);
}

TEST_F(ParameterServerTest, KeySentConcurrentlyIsAppliedOnce) {
  ASSERT_TRUE(Configure(Config(0.125f)).ok());
  auto before = Lookup(true);
  ASSERT_TRUE(before.ok());
  constexpr uint64_t kKeys = 40;
  constexpr int kSenders = 4;
  std::vector<std::thread> senders;
  for (int i = 0; i < kSenders; ++i) {
    senders.emplace_back([&] {
      for (uint64_t reference = 1; reference <= kKeys; ++reference) {
        EXPECT_TRUE(Update({9, reference, before->head.incarnation, 0}, ones_).ok());
      }
    });
  }
  for (auto& sender : senders) sender.join();
  EXPECT_EQ(server_->stats().num_updates, kKeys);
  EXPECT_EQ(server_->stats().num_repeated_updates, (kSenders - 1) * kKeys);
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_NEAR(after->values[0], before->values[0] - 0.125f * kKeys, 1e-4f);
}

TEST_F(ParameterServerTest, StalenessCountsTheUpdatesInBetween) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto lookup = Lookup(true);
  ASSERT_TRUE(lookup.ok());
  const uint64_t incarnation = lookup->head.incarnation;
  for (uint64_t reference = 1; reference <= 3; ++reference) {
    auto update = Update({9, reference, incarnation, 0}, ones_);
    ASSERT_TRUE(update.ok());
    EXPECT_EQ(update->staleness, reference - 1);
  }
  // A lookup of an earlier life of this server has no staleness.
  auto restarted = Update({9, 4, incarnation + 1, 0}, ones_);
  ASSERT_TRUE(restarted.ok());
  EXPECT_EQ(restarted->staleness, 0u);
  EXPECT_EQ(Update({9, 5, incarnation, 1000}, ones_).status().code(), StatusCode::kInvalidArgument);
  const ServerStats stats = server_->stats();
  EXPECT_EQ(stats.num_updates, 4u);
  EXPECT_EQ(stats.max_staleness, 2u);
  EXPECT_EQ(stats.sum_staleness, 3u);
}

TEST_F(ParameterServerTest, SetRowsAndClear) {
  ASSERT_TRUE(Configure(Config()).ok());
  std::vector<float> rows(kNumFloats);
  for (size_t i = 0; i < kNumFloats; ++i) rows[i] = 0.25f * static_cast<float>(i);
  auto set = channel_.Call(Method::kSetRows, WithRows(EncodeSetRowsHead(kBlocks), rows), Soon());
  ASSERT_TRUE(set.ok()) << set.status().ToString();
  auto seen = Lookup(false);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(seen->values, rows);
  ASSERT_TRUE(Call(Method::kClearRows, {}).ok());
  EXPECT_EQ(server_->embedding_store().size(), 0u);
}

TEST_F(ParameterServerTest, ConfigureTwiceAndDifferently) {
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  EXPECT_TRUE(Configure(Config()).ok());
  EXPECT_EQ(Configure(Config(0.1f)).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Configure(Config(0.1f), 1).ok());
  EXPECT_EQ(Configure(Config(), 2).code(), StatusCode::kInvalidArgument);
}

TEST_F(ParameterServerTest, EveryTruncationIsATypedErrorAndChangesNothing) {
  ASSERT_TRUE(Configure(Config()).ok());
  const auto update = Flatten(WithRows(EncodeUpdateHead({1, 1, 0, 0}, kBlocks), ones_));
  auto lookup = EncodeLookupHead(true, kBlocks);
  const auto signs = std::as_bytes(std::span(kSigns));
  lookup.insert(lookup.end(), signs.begin(), signs.end());
  const auto set_rows = Flatten(WithRows(EncodeSetRowsHead(kBlocks), ones_));
  const auto config = [] {
    auto body = std::vector<std::byte>(8);
    const auto encoded = Config().Encode();
    body.insert(body.end(), encoded.begin(), encoded.end());
    return body;
  }();
  const std::pair<Method, std::vector<std::byte>> messages[] = {
      {Method::kUpdateRows, update},
      {Method::kLookupRows, lookup},
      {Method::kSetRows, set_rows},
      {Method::kConfigureServer, config},
  };
  for (const auto& [method, body] : messages) {
    for (size_t size = 0; size < body.size(); ++size) {
      const StatusCode code = Call(method, std::span(body).first(size)).status().code();
      EXPECT_TRUE(code == StatusCode::kCorruption || code == StatusCode::kInvalidArgument)
          << net::MethodName(method) << " of " << size << ": " << StatusCodeName(code);
    }
    auto longer = body;
    longer.resize(body.size() + 8);
    EXPECT_FALSE(Call(method, longer).ok()) << net::MethodName(method);
  }
  EXPECT_FALSE(Call(Method::kPing, update).ok());
  EXPECT_EQ(server_->stats().num_updates, 0u);
  EXPECT_EQ(server_->embedding_store().size(), 0u);
}

TEST_F(ParameterServerTest, NonFiniteGradientsAreRefusedWhole) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto before = Lookup(true);
  ASSERT_TRUE(before.ok());
  auto gradients = ones_;
  gradients[5] = std::numeric_limits<float>::quiet_NaN();
  const Status status = Update({9, 1, 0, 0}, gradients).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("1 of 11"), std::string::npos) << status.message();
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->values, before->values);
}

TEST_F(ParameterServerTest, ReplyAboveTheLimitIsRefusedBeforeItIsAllocated) {
  ASSERT_TRUE(Configure(Config()).ok());
  const std::vector<uint64_t> signs(100, 1);
  Parts parts;
  parts.AddOwned(EncodeLookupHead(false, std::vector<RowBlockHeader>{{kMaxRowDim, 100}}));
  parts.AddView(std::as_bytes(std::span(signs)));
  const Status status = channel_.Call(Method::kLookupRows, parts, Soon()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("fewer signs"), std::string::npos) << status.message();
}

TEST_F(ParameterServerTest, StatsAreJson) {
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  auto reply = Call(Method::kServerStats, {});
  ASSERT_TRUE(reply.ok());
  const std::string json(reinterpret_cast<const char*>(reply->data()), reply->size());
  EXPECT_EQ(json.front(), '{');
  EXPECT_EQ(json.back(), '}');
  for (const char* field : {"\"num_rows\": 3", "\"num_inserted\": 3", "\"num_updates\": 0",
                            "\"mean_staleness\": 0.0", "\"incarnation\": \""}) {
    EXPECT_NE(json.find(field), std::string::npos) << field << " in " << json;
  }
}

TEST_F(ParameterServerTest, CountRowsIsTheStoresSize) {
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  auto reply = Call(Method::kCountRows, {});
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  uint64_t num_rows = 0;
  ASSERT_EQ(reply->size(), sizeof(num_rows));
  std::memcpy(&num_rows, reply->data(), sizeof(num_rows));
  EXPECT_EQ(num_rows, 3u);
  EXPECT_EQ(Call(Method::kCountRows, std::vector<std::byte>(1)).status().code(),
            StatusCode::kCorruption);
}

TEST_F(ParameterServerTest, WithRowsInMemoryItHasNoUseForHints) {
  for (const std::vector<std::byte>& body :
       {std::vector<std::byte>(), std::vector<std::byte>(16)}) {
    auto reply = Call(Method::kPrefetchRows, body);
    ASSERT_TRUE(reply.ok()) << reply.status().ToString();
    auto answer = DecodePrefetchReply(reply->span());
    ASSERT_TRUE(answer.ok()) << answer.status().ToString();
    EXPECT_EQ(answer->is_wanted, 0u);
  }
  EXPECT_EQ(Call(Method::kPrefetchRows, std::vector<std::byte>(9)).status().code(),
            StatusCode::kCorruption);
}

TEST_F(ParameterServerTest, RestartDrawsAnotherIncarnation) {
  auto other = ParameterServer::Create(ParameterServer::Options{});
  ASSERT_TRUE(other.ok());
  EXPECT_NE(other.value()->incarnation(), server_->incarnation());
}

TEST(ReadOnlyParameterServer, AnswersOnceItIsLoadedAndChangesNothing) {
  ParameterServer::Options options;
  options.read_only = true;
  auto server = ParameterServer::Create(options);
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  auto port = server.value()->Start();
  ASSERT_TRUE(port.ok()) << port.status().ToString();
  Channel channel{{.peer = "parameter-server 0"}};
  channel.SetAddress(net::testing::Loopback(*port));
  const Parts empty = net::testing::PartsOf({});

  // The channel tries again until the deadline, as a caller wants it to.
  EXPECT_EQ(channel.Call(Method::kCountRows, empty, In(300)).status().code(),
            StatusCode::kUnavailable);
  server.value()->MarkLoaded();
  EXPECT_TRUE(channel.Call(Method::kCountRows, empty, Soon()).ok());
  for (const Method method :
       {Method::kConfigureServer, Method::kUpdateRows, Method::kSetRows, Method::kClearRows}) {
    const Status refused = channel.Call(method, empty, Soon()).status();
    EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << net::MethodName(method);
  }
}

}  // namespace
}  // namespace persia::server

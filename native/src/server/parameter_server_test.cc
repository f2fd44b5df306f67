#include "server/parameter_server.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/message_test_util.h"
#include "base/row_protocol.h"
#include "net/rpc.h"
#include "net/test_support.h"
#include "store/store_load.h"

namespace persia::server {
namespace {

using net::Channel;
using net::testing::FailureOf;
using net::testing::SegmentsOf;
using net::testing::Soon;
using testing::EncodeToBytes;

struct Rows {
  LookupStamp stamp;
  std::vector<float> values;
};

const std::vector<SignBlock> kBlocks = {{4, 2}, {3, 1}};
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
    return Call(kConfigureServer, body).status();
  }
  StatusOr<Buffer> Call(const MethodId& method, std::span<const std::byte> body) {
    return channel_.Call(method, SegmentsOf(body), Soon());
  }
  StatusOr<Rows> Lookup(bool train) { return Lookup(train, {kBlocks, kSigns}); }
  StatusOr<Rows> Lookup(bool train, const SignBlocks& blocks) {
    auto answer = net::Call(channel_, kLookupRows, {train, blocks}, Soon());
    if (!answer.ok()) return answer.status();
    return Rows{answer->stamp, {answer->rows.begin(), answer->rows.end()}};
  }
  static UpdateRowsRequest MakeUpdate(const BatchKey& key, const LookupStamp& lookup,
                                      std::span<const float> gradients) {
    return {key, lookup, {kBlocks, kSigns}, gradients};
  }
  StatusOr<UpdateResult> Update(const BatchKey& key, const LookupStamp& lookup,
                                std::span<const float> gradients) {
    return net::Call(channel_, kUpdateRows, MakeUpdate(key, lookup, gradients), Soon());
  }

  const std::vector<float> ones_ = std::vector<float>(kNumFloats, 1.0f);
  std::unique_ptr<ParameterServer> server_;
  Channel channel_{{.peer = "parameter-server 1"}};
};

TEST_F(ParameterServerTest, ReplicaIndexMustBeBelowTheSize) {
  ParameterServer::Options options;
  options.replica_index = 3;
  options.replica_size = 3;
  EXPECT_EQ(ParameterServer::Create(options).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(ParameterServerTest, TrainingBeforeConfigureIsFailedPrecondition) {
  EXPECT_EQ(Lookup(true).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Update({1, 1}, {0, 0}, ones_).status().code(), StatusCode::kFailedPrecondition);
  auto inference = Lookup(false);
  ASSERT_TRUE(inference.ok());
  EXPECT_EQ(inference->values, std::vector<float>(kNumFloats, 0.0f));
  // The refused update was not remembered as applied.
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  auto update = Update({1, 1}, {0, 0}, ones_);
  ASSERT_TRUE(update.ok()) << update.status().ToString();
  EXPECT_EQ(update->num_updated, 3u);
}

TEST_F(ParameterServerTest, LookupUpdateRoundTrip) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto before = Lookup(true);
  ASSERT_TRUE(before.ok()) << before.status().ToString();
  EXPECT_EQ(before->stamp.incarnation, server_->incarnation());
  EXPECT_EQ(before->stamp.update_counter, 0u);
  auto update = Update({9, 1}, {before->stamp.incarnation, 0}, ones_);
  ASSERT_TRUE(update.ok()) << update.status().ToString();
  EXPECT_EQ(update->staleness, 0u);
  EXPECT_EQ(update->num_updated, 3u);
  EXPECT_EQ(update->num_missing, 0u);
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->stamp.update_counter, 1u);
  for (size_t i = 0; i < kNumFloats; ++i) {
    EXPECT_FLOAT_EQ(after->values[i], before->values[i] - 0.5f) << i;
  }
}

// Blocks of one dim that follow one another are looked up together; their rows lie as they were
// asked for.
TEST_F(ParameterServerTest, RowsOfBlocksOfOneDimLieInTheirOrder) {
  ASSERT_TRUE(Configure(Config()).ok());
  const std::vector<uint64_t> signs = {11, 12, 13, 14, 15, 16};
  const auto lookup = [&](const std::vector<SignBlock>& blocks,
                          std::span<const uint64_t> of) -> std::vector<float> {
    auto rows = Lookup(true, {blocks, of});
    EXPECT_TRUE(rows.ok()) << rows.status().ToString();
    return rows.ok() ? rows->values : std::vector<float>();
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
    auto update = Update({9, 1}, {before->stamp.incarnation, 0}, ones_);
    ASSERT_TRUE(update.ok());
    EXPECT_EQ(update->num_updated, 3u);
  }
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_FLOAT_EQ(after->values[0], before->values[0] - 0.5f);
  EXPECT_EQ(server_->metrics()["num_updates"], 1u);
  EXPECT_EQ(server_->metrics()["num_repeated_updates"], 2u);
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
        EXPECT_TRUE(Update({9, reference}, {before->stamp.incarnation, 0}, ones_).ok());
      }
    });
  }
  for (auto& sender : senders) sender.join();
  EXPECT_EQ(server_->metrics()["num_updates"], kKeys);
  EXPECT_EQ(server_->metrics()["num_repeated_updates"], (kSenders - 1) * kKeys);
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_NEAR(after->values[0], before->values[0] - 0.125f * kKeys, 1e-4f);
}

TEST_F(ParameterServerTest, StalenessCountsTheUpdatesInBetween) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto lookup = Lookup(true);
  ASSERT_TRUE(lookup.ok());
  const uint64_t incarnation = lookup->stamp.incarnation;
  for (uint64_t reference = 1; reference <= 3; ++reference) {
    auto update = Update({9, reference}, {incarnation, 0}, ones_);
    ASSERT_TRUE(update.ok());
    EXPECT_EQ(update->staleness, reference - 1);
  }
  // A lookup of an earlier life of this server has no staleness.
  auto restarted = Update({9, 4}, {incarnation + 1, 0}, ones_);
  ASSERT_TRUE(restarted.ok());
  EXPECT_EQ(restarted->staleness, 0u);
  EXPECT_EQ(Update({9, 5}, {incarnation, 1000}, ones_).status().code(),
            StatusCode::kInvalidArgument);
  const Metrics stats = server_->metrics();
  EXPECT_EQ(stats["num_updates"], 4u);
  EXPECT_EQ(stats["max_staleness"], 2u);
  EXPECT_EQ(stats["sum_staleness"], 3u);
}

TEST_F(ParameterServerTest, SetRowsAndClear) {
  ASSERT_TRUE(Configure(Config()).ok());
  std::vector<float> rows(kNumFloats);
  for (size_t i = 0; i < kNumFloats; ++i) rows[i] = 0.25f * static_cast<float>(i);
  const Status set = net::Call(channel_, kSetRows, {{kBlocks, kSigns}, rows}, Soon());
  ASSERT_TRUE(set.ok()) << set.ToString();
  auto seen = Lookup(false);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(seen->values, rows);
  ASSERT_TRUE(Call(kClearRows, {}).ok());
  EXPECT_EQ(server_->embedding_store().size(), 0u);
}

// Ranks with consistency="exact" compare it with that of the rows which they hold.
TEST_F(ParameterServerTest, RowsThatAreReplacedHaveAnotherIncarnation) {
  ASSERT_TRUE(Configure(Config()).ok());
  uint64_t last = Lookup(true)->stamp.incarnation;
  const uint64_t first = last;
  const auto expect_another = [&](const char* after) {
    const uint64_t now = Lookup(true)->stamp.incarnation;
    EXPECT_NE(now, last) << after;
    EXPECT_NE(now, first) << after;
    last = now;
  };
  ASSERT_TRUE(Update({9, 1}, {first, 0}, ones_).ok());
  EXPECT_EQ(Lookup(true)->stamp.incarnation, first) << "an update replaces no rows";
  ASSERT_TRUE(net::Call(channel_, kSetRows, {{kBlocks, kSigns}, ones_}, Soon()).ok());
  expect_another("rows were set");
  ASSERT_TRUE(Call(kClearRows, {}).ok());
  expect_another("rows were cleared");
  const auto load = store::StoreLoad::Begin(server_->embedding_store()).value();
  ASSERT_TRUE(load->Replace(Config()).ok());
  expect_another("a load has removed the rows");
  const std::vector<uint32_t> ages(kSigns.size());
  const store::LoadedRows rows{.dim = 3, .signs = kSigns, .ages = ages, .embeddings = ones_.data()};
  ASSERT_TRUE(load->Add(rows).ok());
  expect_another("rows were loaded");
  ASSERT_TRUE(load->Apply({.removals = {kSigns}, .rows = {}}).ok());
  expect_another("a packet has removed rows");
  ASSERT_TRUE(load->Apply({.removals = {}, .rows = {rows}}).ok());
  expect_another("a packet has changed rows");
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
  const std::pair<MethodId, std::vector<std::byte>> messages[] = {
      {kUpdateRows, EncodeToBytes(MakeUpdate({1, 1}, {0, 0}, ones_))},
      {kLookupRows, EncodeToBytes(LookupRowsRequest{true, {kBlocks, kSigns}})},
      {kSetRows, EncodeToBytes(SetRowsRequest{{kBlocks, kSigns}, ones_})},
      {kConfigureServer, EncodeToBytes(ConfigureRequest{Config()})},
  };
  for (const auto& [method, body] : messages) {
    for (size_t size = 0; size < body.size(); ++size) {
      const StatusCode code = Call(method, std::span(body).first(size)).status().code();
      EXPECT_TRUE(code == StatusCode::kCorruption || code == StatusCode::kInvalidArgument)
          << method.name << " of " << size << ": " << StatusCodeName(code);
    }
    auto longer = body;
    longer.resize(body.size() + 8);
    EXPECT_FALSE(Call(method, longer).ok()) << method.name;
  }
  EXPECT_FALSE(Call(kClearRows, messages[0].second).ok());
  EXPECT_EQ(server_->metrics()["num_updates"], 0u);
  EXPECT_EQ(server_->embedding_store().size(), 0u);
}

TEST_F(ParameterServerTest, NonFiniteGradientsAreRefusedWhole) {
  ASSERT_TRUE(Configure(Config()).ok());
  auto before = Lookup(true);
  ASSERT_TRUE(before.ok());
  auto gradients = ones_;
  gradients[5] = std::numeric_limits<float>::quiet_NaN();
  const Status status = Update({9, 1}, {0, 0}, gradients).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("1 of 11"), std::string::npos) << status.message();
  auto after = Lookup(false);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->values, before->values);
}

TEST_F(ParameterServerTest, ReplyAboveTheLimitIsRefusedBeforeItIsAllocated) {
  ASSERT_TRUE(Configure(Config()).ok());
  const std::vector<uint64_t> signs(100, 1);
  const SignBlock block{kMaxRowDim, 100};
  const Status status = Lookup(false, {{&block, 1}, signs}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("fewer signs"), std::string::npos) << status.message();
}

TEST_F(ParameterServerTest, MetricsHaveUniqueKeysAndNames) {
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  const Metrics metrics = server_->metrics();
  EXPECT_EQ(metrics["num_rows"], 3u);
  EXPECT_EQ(metrics["num_inserted_rows"], 3u);
  EXPECT_EQ(metrics["configured"], 1u);
  EXPECT_EQ(metrics["rpc_num_requests"], 2u);
  std::set<std::string> keys, names;
  for (const Metric& metric : metrics) {
    EXPECT_TRUE(keys.insert(metric.info.key).second) << metric.info.key;
    if (metric.info.name == nullptr) continue;
    EXPECT_TRUE(names.insert(metric.info.name).second) << metric.info.name;
    EXPECT_STRNE(metric.info.help, "") << metric.info.name;
  }
}

TEST_F(ParameterServerTest, CountRowsIsTheStoresSize) {
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  auto reply = Call(kCountRows, {});
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  uint64_t num_rows = 0;
  ASSERT_EQ(reply->size(), sizeof(num_rows));
  std::memcpy(&num_rows, reply->data(), sizeof(num_rows));
  EXPECT_EQ(num_rows, 3u);
  EXPECT_EQ(Call(kCountRows, std::vector<std::byte>(1)).status().code(), StatusCode::kCorruption);
}

TEST_F(ParameterServerTest, LoadCountsRowsLookupsAndUpdates) {
  ASSERT_TRUE(Configure(Config()).ok());
  ASSERT_TRUE(Lookup(true).ok());
  ASSERT_TRUE(Lookup(false).ok());
  ASSERT_TRUE(Update({1, 1}, {0, 0}, ones_).ok());
  ASSERT_TRUE(Update({1, 1}, {0, 0}, ones_).ok());  // repeated: applied and counted once
  auto load = net::Call(channel_, kMeasureLoad, Empty(), Soon());
  ASSERT_TRUE(load.ok()) << load.status().ToString();
  EXPECT_EQ(load->num_rows, 3u);
  EXPECT_EQ(load->num_looked_up_rows, 6u);
  EXPECT_EQ(load->num_updated_rows, 3u);
  EXPECT_EQ(load->memory_bytes, server_->metrics()["memory_bytes"]);
  EXPECT_GT(load->memory_bytes, 0u);
}

TEST_F(ParameterServerTest, WithRowsInMemoryItHasNoUseForHints) {
  for (const std::vector<std::byte>& body :
       {std::vector<std::byte>(), std::vector<std::byte>(16)}) {
    auto reply = Call(kPrefetchRows, body);
    ASSERT_TRUE(reply.ok()) << reply.status().ToString();
    auto answer = DecodeMessage<PrefetchRowsReply>(std::as_const(*reply).span());
    ASSERT_TRUE(answer.ok()) << answer.status().ToString();
    EXPECT_EQ(answer->is_wanted, 0u);
  }
  EXPECT_EQ(Call(kPrefetchRows, std::vector<std::byte>(9)).status().code(),
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
  const Segments empty;

  // The channel tries again until the deadline, as a caller wants it to.
  const auto call = [&](auto deadline) {
    return channel.Call(kCountRows, empty, deadline).status();
  };
  const Status loading = FailureOf(call, "still loads", 300);
  EXPECT_EQ(loading.code(), StatusCode::kUnavailable) << loading.ToString();
  EXPECT_NE(loading.message().find("still loads"), std::string::npos) << loading.ToString();
  server.value()->MarkLoaded();
  EXPECT_TRUE(channel.Call(kCountRows, empty, Soon()).ok());
  for (const MethodId& method :
       std::vector<MethodId>{kConfigureServer, kUpdateRows, kSetRows, kClearRows}) {
    const Status refused = channel.Call(method, empty, Soon()).status();
    EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << method.name;
  }
}

}  // namespace
}  // namespace persia::server

// Tests of the base layer: status, byte encoding, hashing and the train config.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/placement.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "base/train_config.h"

namespace persia {
namespace {

TEST(StatusTest, NamesCodeAndMessage) {
  EXPECT_EQ(Status::Ok().ToString(), "Ok");
  EXPECT_EQ(InvalidArgument("lr is 0").ToString(), "InvalidArgument: lr is 0");
  EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(200)), "Unknown");
}

TEST(StatusTest, StatusOrHoldsValueOrReason) {
  StatusOr<std::string> value = std::string("rows");
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(value.value(), "rows");
  EXPECT_TRUE(value.status().ok());
  StatusOr<std::string> failed = NotFound("no rows");
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.status().code(), StatusCode::kNotFound);
}

TEST(BufferTest, IsAligned) {
  for (size_t size : {0, 1, 63, 64, 65, 4097}) {
    Buffer buffer(size);
    EXPECT_EQ(buffer.size(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  }
}

TEST(BufferTest, WhatIsMovedFromIsEmpty) {
  Buffer first(10);
  Buffer second(std::move(first));
  EXPECT_TRUE(first.span().empty());  // NOLINT: looked at on purpose
  EXPECT_EQ(second.size(), 10u);
  Buffer third;
  third = std::move(second);
  EXPECT_TRUE(second.span().empty());  // NOLINT: looked at on purpose
  EXPECT_EQ(third.size(), 10u);
}

// u32, a string and an array, as every message of the wire format mixes them.
std::vector<std::byte> EncodeSample() {
  ByteWriter writer;
  writer.Put<uint32_t>(7);
  writer.PutString("feature");
  const std::vector<uint64_t> ids = {1, 2, 3};
  writer.PutArray(std::span<const uint64_t>(ids));
  return writer.Release();
}

bool DecodeSample(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  const auto number = reader.Get<uint32_t>();
  const auto name = reader.GetString(7);
  const auto ids = reader.GetArray<uint64_t>(3);
  return reader.ok() && reader.remaining() == 0 && number == 7 && name == "feature" &&
         ids.size() == 3 && ids[2] == 3;
}

TEST(BytesTest, RoundTrip) {
  const auto bytes = EncodeSample();
  EXPECT_EQ(bytes.size(), 8u + 8u + 24u);
  EXPECT_TRUE(DecodeSample(bytes));
}

TEST(BytesTest, TruncationIsRefusedAtEveryLength) {
  const auto bytes = EncodeSample();
  for (size_t length = 0; length < bytes.size(); ++length) {
    // An exact copy, so that AddressSanitizer sees a read past the end.
    Buffer copy(length);
    if (length > 0) std::memcpy(copy.data(), bytes.data(), length);
    EXPECT_FALSE(DecodeSample(copy.span())) << "length " << length;
  }
}

TEST(BytesTest, HugeCountsDoNotOverflow) {
  const auto bytes = EncodeSample();
  ByteReader reader(bytes);
  EXPECT_TRUE(reader.GetArray<uint64_t>(std::numeric_limits<uint64_t>::max() / 4).empty());
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.Get<uint32_t>(), 0u) << "a failed reader stays failed";
}

// The published system's hash-stack vectors: rounds 2, size 10.
TEST(HashTest, MatchesPublishedHashStackVectors) {
  struct Case {
    uint64_t id, first, second;
  };
  for (const Case& c : {Case{12, 2, 18}, Case{23, 5, 10}, Case{34, 0, 11}, Case{56, 6, 17},
                        Case{78, 7, 12}, Case{90, 8, 16}}) {
    const uint64_t once = SignHash(c.id);
    const uint64_t twice = SignHash(once);
    EXPECT_EQ(once % 10, c.first) << c.id;
    EXPECT_EQ(twice % 10 + 10, c.second) << c.id;
  }
}

TEST(HashTest, ConsecutiveSignsSpreadEvenly) {
  constexpr uint32_t kSigns = 120'000;
  for (uint32_t parts : {2u, 3u, 16u, 100u}) {
    std::vector<uint32_t> servers(parts);
    const Placement placement(parts);
    for (uint64_t sign = 0; sign < kSigns; ++sign) ++servers[placement.ServerOf(SignHash(sign))];
    const double mean = double{kSigns} / parts;
    // Virtual shards do not divide evenly over servers: up to one part in (4096 / parts) more.
    const double slack = 6 * std::sqrt(mean) + mean * parts / kNumVirtualShards;
    for (uint32_t i = 0; i < parts; ++i) {
      EXPECT_NEAR(servers[i], mean, slack) << "server " << i << " of " << parts;
    }
  }
}

OptimizerConfig Optimizer(OptimizerKind kind) {
  OptimizerConfig config;
  config.kind = kind;
  return config;
}

TEST(IncarnationTest, IsDrawnAnewAndNeverNone) {
  const uint64_t first = DrawIncarnation();
  EXPECT_NE(first, 0u);
  EXPECT_NE(first, DrawIncarnation());
}

TEST(TrainConfigTest, StateFloats) {
  EXPECT_EQ(Optimizer(OptimizerKind::kSgd).StateFloats(12), 0u);
  OptimizerConfig momentum = Optimizer(OptimizerKind::kSgd);
  momentum.momentum = 0.9f;
  EXPECT_EQ(momentum.StateFloats(12), 12u);
  EXPECT_EQ(Optimizer(OptimizerKind::kAdagrad).StateFloats(12), 12u);
  EXPECT_EQ(Optimizer(OptimizerKind::kRowwiseAdagrad).StateFloats(12), 1u);
  EXPECT_EQ(Optimizer(OptimizerKind::kAdam).StateFloats(12), 24u);
  EXPECT_EQ(Optimizer(OptimizerKind::kLion).StateFloats(12), 12u);
}

TEST(OptimizerTest, DefaultsAreValidAndNamesLeadBack) {
  for (uint32_t kind = 0; kind < kNumOptimizerKinds; ++kind) {
    const auto config = OptimizerConfig::Of(static_cast<OptimizerKind>(kind));
    EXPECT_TRUE(config.Validate().ok()) << config.Validate().ToString();
    EXPECT_EQ(OptimizerOfName(OptimizerName(config.kind)), config.kind);
  }
  EXPECT_EQ(OptimizerOfName("tiger"), std::nullopt);
}

TEST(OptimizerTest, RefusesWhatMakesNoSenseTogether) {
  OptimizerConfig nesterov = Optimizer(OptimizerKind::kSgd), dampened = nesterov;
  nesterov.nesterov = 1.0f;
  dampened.dampening = 0.5f;
  EXPECT_NE(nesterov.Validate().message().find("nesterov"), std::string::npos);
  EXPECT_NE(dampened.Validate().message().find("dampening"), std::string::npos);
  nesterov.momentum = dampened.momentum = 0.9f;
  EXPECT_TRUE(nesterov.Validate().ok());
  EXPECT_TRUE(dampened.Validate().ok());
  nesterov.dampening = 0.5f;
  EXPECT_FALSE(nesterov.Validate().ok()) << "as torch refuses it";
  OptimizerConfig ftrl = OptimizerConfig::Of(OptimizerKind::kFtrl);
  ftrl.initial_accumulator_value = 0.0f;
  EXPECT_NE(ftrl.Validate().message().find("beta"), std::string::npos);
  ftrl.beta = 1.0f;
  EXPECT_TRUE(ftrl.Validate().ok());
}

TrainConfig AdamConfig() {
  TrainConfig config;
  config.optimizer = Optimizer(OptimizerKind::kAdam);
  config.optimizer.lr = 0.5f;
  config.optimizer.weight_decay = 0.25f;
  config.optimizer.eps = 1e-8f;
  config.optimizer.beta1 = 0.75f;
  config.optimizer.beta2 = 0.875f;
  config.initializer = {.lower = -0.5f, .upper = 0.25f, .seed = 0x0123456789abcdef};
  config.admit_probability = 0.5f;
  config.weight_bound = 3.0f;
  config.time_to_live_sec = 7.5f;
  config.min_norm = 0.125f;
  return config;
}

TEST(TrainConfigTest, EncodingRoundTripsAndHasTheDocumentedLayout) {
  const TrainConfig config = AdamConfig();
  const auto bytes = config.Encode();
  ASSERT_EQ(bytes.size(), 144u);
  ByteReader reader(bytes);
  EXPECT_EQ(reader.Get<uint32_t>(), 3u);  // version
  EXPECT_EQ(reader.Get<uint32_t>(), 0u);  // prefix bits
  EXPECT_EQ(reader.Get<uint32_t>(), 0u);  // groups
  EXPECT_EQ(reader.Get<float>(), 1.0f);   // lr_factor
  EXPECT_EQ(reader.Get<uint32_t>(), 3u);  // kind
  for (float expected : {0.5f, 0.25f, 0.0f, 0.0f, 1.0f, 1e-8f, 0.75f, 0.875f, 0.0f, 0.0f, 0.99f,
                         0.0f, 0.9f, 0.0f, 0.0f, 0.0f}) {
    EXPECT_EQ(reader.Get<float>(), expected);
  }
  EXPECT_EQ(reader.Get<uint32_t>(), 0u);  // initializer kind
  for (float expected : {-0.5f, 0.25f, 0.0f, 0.0f, 0.5f}) EXPECT_EQ(reader.Get<float>(), expected);
  EXPECT_EQ(reader.Get<uint32_t>(), 1u);  // admit_after
  EXPECT_EQ(reader.Get<float>(), 3.0f);
  EXPECT_EQ(reader.Get<float>(), 7.5f);  // time_to_live_sec
  EXPECT_EQ(reader.Get<uint64_t>(), 0x0123456789abcdefu);
  EXPECT_EQ(reader.Get<uint64_t>(), 0u);  // capacity
  EXPECT_EQ(reader.Get<float>(), 0.125f);
  EXPECT_EQ(reader.Get<uint32_t>(), 0u);  // reserved
  auto decoded = TrainConfig::Decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value(), config);
}

// Checkpoints written before rows could expire.
TEST(TrainConfigTest, DecodesVersion2) {
  TrainConfig config = AdamConfig();
  config.time_to_live_sec = 0;  // reserved then
  config.min_norm = 0;
  auto bytes = config.Encode();
  bytes.resize(128);
  bytes[0] = std::byte{2};
  const auto decoded = TrainConfig::Decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value(), config);
  bytes.push_back(std::byte{0});
  EXPECT_EQ(TrainConfig::Decode(bytes).status().code(), StatusCode::kCorruption);
}

TrainConfig GroupsConfig() {
  TrainConfig config = AdamConfig();
  config.feature_index_prefix_bit = 8;
  config.lr_factor = 0.5f;
  for (const uint32_t group : {3u, 200u}) {
    RowConfig rows;
    rows.optimizer = OptimizerConfig::Of(static_cast<OptimizerKind>(group % kNumOptimizerKinds));
    rows.initializer = {.lower = -1.0f,
                        .upper = std::numeric_limits<float>::infinity(),
                        .kind = InitializerKind::kNormal,
                        .stddev = 0.5f,
                        .scaled_by_dim = true};
    rows.admit_after = group;
    rows.capacity = uint64_t{group} << 32;
    config.groups.push_back({group, rows});
  }
  return config;
}

TEST(TrainConfigTest, GroupsRoundTripAndAreFoundByNumber) {
  const TrainConfig config = GroupsConfig();
  const auto bytes = config.Encode();
  auto decoded = TrainConfig::Decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value(), config);
  EXPECT_EQ(config.Of(200).admit_after, 200u);
  EXPECT_EQ(config.Of(4).admit_after, 1u);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(TrainConfig::Decode(std::span(bytes).first(length)).ok()) << length;
  }
}

TEST(TrainConfigTest, RefusesGroupsThatDoNotRiseOrDoNotFitThePrefix) {
  const auto refuses = [](void (*spoil)(TrainConfig&)) {
    TrainConfig config = GroupsConfig();
    spoil(config);
    return config.Validate().code() == StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(refuses([](auto&) {}));
  EXPECT_TRUE(refuses([](auto& c) { c.groups[1].group = 3; }));
  EXPECT_TRUE(refuses([](auto& c) { c.groups[1].group = 256; }));
  EXPECT_TRUE(refuses([](auto& c) { c.feature_index_prefix_bit = 33; }));
  EXPECT_TRUE(refuses([](auto& c) { c.feature_index_prefix_bit = 0; }));
  EXPECT_TRUE(refuses([](auto& c) { c.groups.clear(); }));
  EXPECT_TRUE(refuses([](auto& c) { c.groups[0].rows.optimizer.lr = -1; }));
  EXPECT_TRUE(refuses([](auto& c) { c.lr_factor = -1; }));
  EXPECT_TRUE(refuses([](auto& c) {
    c.feature_index_prefix_bit = 32;
    c.groups[1].group = kMaxGroupNumber + 1;
  })) << "a table of all numbers is made of them";
}

TEST(SlotRowConfigTest, TakesTheRestFromTheJob) {
  const TrainConfig job = AdamConfig();
  EXPECT_EQ(SlotRowConfig().Over(job, 0.5f), static_cast<const RowConfig&>(job));
  SlotRowConfig slot;
  slot.optimizer = OptimizerConfig::Of(OptimizerKind::kAdagrad);
  slot.optimizer->lr = 0.25f;
  slot.initializer = Initializer{.lower = 0, .upper = 0};
  slot.admit_after = 3;
  slot.time_to_live_sec = 0;
  slot.capacity = 9;
  const RowConfig rows = slot.Over(job, 0.5f);
  EXPECT_EQ(rows.optimizer.lr, 0.125f);
  EXPECT_EQ(rows.initializer.seed, job.initializer.seed);
  EXPECT_EQ(rows.initializer.upper, 0.0f);
  EXPECT_EQ(rows.admit_probability, job.admit_probability);
  EXPECT_EQ(rows.admit_after, 3u);
  EXPECT_EQ(rows.weight_bound, job.weight_bound);
  EXPECT_EQ(rows.time_to_live_sec, 0.0f);
  EXPECT_EQ(rows.min_norm, job.min_norm);
  EXPECT_EQ(rows.capacity, 9u);
}

TEST(TrainConfigTest, DecodeRefusesWrongLengthVersionKindAndValues) {
  const auto good = AdamConfig().Encode();
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_EQ(TrainConfig::Decode(std::span(good).first(length)).status().code(),
              StatusCode::kCorruption);
  }
  auto with = [&good](size_t offset, auto value) {
    auto bytes = good;
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
    return TrainConfig::Decode(bytes).status().code();
  };
  EXPECT_EQ(with(0, uint32_t{1}), StatusCode::kCorruption);
  EXPECT_EQ(with(8, uint32_t{1}), StatusCode::kCorruption) << "a group that is not there";
  EXPECT_EQ(with(8, uint32_t{0xffffffff}), StatusCode::kCorruption);
  EXPECT_EQ(with(16, kNumOptimizerKinds), StatusCode::kCorruption);
  EXPECT_EQ(with(16, uint32_t{0x103}), StatusCode::kCorruption) << "not truncated to 8 bits";
  EXPECT_EQ(with(84, uint32_t{2}), StatusCode::kCorruption) << "initializer kind";
  EXPECT_EQ(with(84, uint32_t{0x200}), StatusCode::kCorruption);
  EXPECT_EQ(with(140, uint32_t{1}), StatusCode::kCorruption) << "reserved";
  EXPECT_EQ(with(20, std::nanf("")), StatusCode::kInvalidArgument);
  auto longer = good;
  longer.resize(152);
  EXPECT_EQ(TrainConfig::Decode(longer).status().code(), StatusCode::kCorruption);
}

struct Refusal {
  std::string field;  // must be named in the message
  OptimizerKind kind;
  std::function<void(TrainConfig&)> spoil;
};

TEST(TrainConfigTest, RefusesValuesOutOfRangeNamingTheField) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  using K = OptimizerKind;
  const std::vector<Refusal> refusals = {
      {"kind", static_cast<K>(kNumOptimizerKinds), [](auto&) {}},
      {"lr", K::kFtrl, [](auto& c) { c.optimizer.lr = 0; }},
      {"lr", K::kAdam, [](auto& c) { c.optimizer.lr = -1; }},
      {"lr", K::kAdam, [](auto& c) { c.optimizer.lr = kInf; }},
      {"weight_decay", K::kSgd, [](auto& c) { c.optimizer.weight_decay = -1; }},
      {"momentum", K::kSgd, [](auto& c) { c.optimizer.momentum = 1; }},
      {"initial_accumulator_value", K::kAdagrad,
       [](auto& c) { c.optimizer.initial_accumulator_value = -1; }},
      {"g_square_momentum", K::kRowwiseAdagrad, [](auto& c) { c.optimizer.g_square_momentum = 0; }},
      {"eps", K::kAdagrad, [](auto& c) { c.optimizer.eps = 0; }},
      {"beta1", K::kAdam, [](auto& c) { c.optimizer.beta1 = 1; }},
      {"beta2", K::kAdam, [](auto& c) { c.optimizer.beta2 = kNan; }},
      {"initializer.lower", K::kSgd, [](auto& c) { c.initializer.lower = -kInf; }},
      {"initializer.upper", K::kSgd, [](auto& c) { c.initializer.upper = -1; }},
      {"initializer.upper - initializer.lower", K::kSgd,
       [](auto& c) { c.initializer = {.lower = -3e38f, .upper = 3e38f}; }},
      {"dampening", K::kSgd, [](auto& c) { c.optimizer.dampening = 1; }},
      {"nesterov", K::kSgd, [](auto& c) { c.optimizer.nesterov = 0.5f; }},
      {"alpha", K::kRmsprop, [](auto& c) { c.optimizer.alpha = 1; }},
      {"centered", K::kRmsprop, [](auto& c) { c.optimizer.centered = 2; }},
      {"rho", K::kAdadelta, [](auto& c) { c.optimizer.rho = -0.5f; }},
      {"l1", K::kFtrl, [](auto& c) { c.optimizer.l1 = -1; }},
      {"initializer.mean", K::kSgd, [](auto& c) { c.initializer.mean = 1; }},
      {"initializer.std", K::kSgd, [](auto& c) { c.initializer.stddev = 1; }},
      {"initializer.std", K::kSgd, [](auto& c) { c.initializer.kind = InitializerKind::kNormal; }},
      {"initializer.lower", K::kSgd,
       [](auto& c) {
         c.initializer = {.lower = 5, .upper = 6, .kind = InitializerKind::kNormal, .stddev = 1};
       }},
      {"admit_after", K::kSgd, [](auto& c) { c.admit_after = 0; }},
      {"admit_after", K::kSgd, [](auto& c) { c.admit_after = 256; }},
      {"admit_probability", K::kSgd, [](auto& c) { c.admit_probability = 1.5f; }},
      {"weight_bound", K::kSgd, [](auto& c) { c.weight_bound = -1; }},
      {"time_to_live_sec", K::kSgd, [](auto& c) { c.time_to_live_sec = -1; }},
      {"time_to_live_sec", K::kSgd, [](auto& c) { c.time_to_live_sec = kInf; }},
      {"min_norm", K::kSgd, [](auto& c) { c.min_norm = kNan; }},
  };
  for (const Refusal& refusal : refusals) {
    TrainConfig config;
    config.optimizer.kind = refusal.kind;
    refusal.spoil(config);
    const Status status = config.Validate();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << refusal.field;
    EXPECT_NE(status.message().find(refusal.field), std::string::npos) << status.message();
  }
}

TEST(TrainConfigTest, RefusesHyperParametersTheKindDoesNotHave) {
  using K = OptimizerKind;
  struct Parameter {
    std::string field;
    float OptimizerConfig::* member;
    std::vector<K> kinds_that_have_it;
    float value = 0.5f;
  };
  const std::vector<Parameter> parameters = {
      {"momentum", &OptimizerConfig::momentum, {K::kSgd, K::kRmsprop}},
      {"alpha", &OptimizerConfig::alpha, {K::kRmsprop}},
      {"centered", &OptimizerConfig::centered, {K::kRmsprop}, 1.0f},
      {"rho", &OptimizerConfig::rho, {K::kAdadelta}},
      {"l1", &OptimizerConfig::l1, {K::kFtrl}},
      {"l2", &OptimizerConfig::l2, {K::kFtrl}},
      {"beta", &OptimizerConfig::beta, {K::kFtrl}},
      {"weight_decay",
       &OptimizerConfig::weight_decay,
       {K::kSgd, K::kAdagrad, K::kRowwiseAdagrad, K::kAdam, K::kAdamW, K::kRmsprop, K::kAdadelta,
        K::kAdamax, K::kLion}},
      {"initial_accumulator_value",
       &OptimizerConfig::initial_accumulator_value,
       {K::kAdagrad, K::kRowwiseAdagrad, K::kFtrl}},
      {"g_square_momentum", &OptimizerConfig::g_square_momentum, {K::kAdagrad, K::kRowwiseAdagrad}},
      {"eps",
       &OptimizerConfig::eps,
       {K::kAdagrad, K::kRowwiseAdagrad, K::kAdam, K::kAdamW, K::kRmsprop, K::kAdadelta,
        K::kAdamax}},
      {"beta1", &OptimizerConfig::beta1, {K::kAdam, K::kAdamW, K::kAdamax, K::kLion}},
      {"beta2", &OptimizerConfig::beta2, {K::kAdam, K::kAdamW, K::kAdamax, K::kLion}},
  };
  for (const Parameter& parameter : parameters) {
    for (uint32_t number = 0; number < kNumOptimizerKinds; ++number) {
      const K kind = static_cast<K>(number);
      OptimizerConfig config = OptimizerConfig::Of(kind);
      config.*parameter.member = parameter.value;
      const auto& having = parameter.kinds_that_have_it;
      const bool has = std::find(having.begin(), having.end(), kind) != having.end();
      const Status status = config.Validate();
      EXPECT_EQ(status.ok(), has) << parameter.field << " of kind " << static_cast<int>(kind);
      if (!has) {
        EXPECT_NE(status.message().find(parameter.field), std::string::npos) << status.message();
      }
    }
  }
}

}  // namespace
}  // namespace persia

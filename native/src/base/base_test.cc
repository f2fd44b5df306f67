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
#include "base/incarnation.h"
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
    std::vector<uint32_t> servers(parts), shards(parts);
    for (uint64_t sign = 0; sign < kSigns; ++sign) {
      const uint64_t hash = SignHash(sign);
      ++servers[ServerOf(hash, parts)];
      ++shards[InternalShard(hash, parts)];
    }
    const double mean = double{kSigns} / parts;
    // Virtual shards do not divide evenly over servers: up to one part in (4096 / parts) more.
    const double slack = 6 * std::sqrt(mean) + mean * parts / kNumVirtualShards;
    for (uint32_t i = 0; i < parts; ++i) {
      EXPECT_NEAR(servers[i], mean, slack) << "server " << i << " of " << parts;
      EXPECT_NEAR(shards[i], mean, 6 * std::sqrt(mean)) << "shard " << i << " of " << parts;
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
  return config;
}

TEST(TrainConfigTest, EncodingRoundTripsAndHasTheDocumentedLayout) {
  const TrainConfig config = AdamConfig();
  const auto bytes = config.Encode();
  ASSERT_EQ(bytes.size(), 64u);
  ByteReader reader(bytes);
  EXPECT_EQ(reader.Get<uint32_t>(), 1u);  // version
  EXPECT_EQ(reader.Get<uint32_t>(), 3u);  // kind
  for (float expected : {0.5f, 0.25f, 0.0f, 0.0f, 1.0f, 1e-8f, 0.75f, 0.875f, -0.5f, 0.25f}) {
    EXPECT_EQ(reader.Get<float>(), expected);
  }
  EXPECT_EQ(reader.Get<uint64_t>(), 0x0123456789abcdefu);
  EXPECT_EQ(reader.Get<float>(), 0.5f);
  EXPECT_EQ(reader.Get<float>(), 3.0f);
  auto decoded = TrainConfig::Decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value(), config);
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
  EXPECT_EQ(with(0, uint32_t{2}), StatusCode::kCorruption);
  EXPECT_EQ(with(4, uint32_t{4}), StatusCode::kCorruption);
  EXPECT_EQ(with(4, uint32_t{0x103}), StatusCode::kCorruption) << "not truncated to 8 bits";
  EXPECT_EQ(with(8, std::nanf("")), StatusCode::kInvalidArgument);
  auto longer = good;
  longer.resize(72);
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
      {"kind", static_cast<K>(9), [](auto&) {}},
      {"lr", K::kSgd, [](auto& c) { c.optimizer.lr = 0; }},
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
      {"admit_probability", K::kSgd, [](auto& c) { c.admit_probability = 1.5f; }},
      {"weight_bound", K::kSgd, [](auto& c) { c.weight_bound = -1; }},
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
  };
  const std::vector<Parameter> parameters = {
      {"momentum", &OptimizerConfig::momentum, {K::kSgd}},
      {"initial_accumulator_value",
       &OptimizerConfig::initial_accumulator_value,
       {K::kAdagrad, K::kRowwiseAdagrad}},
      {"g_square_momentum", &OptimizerConfig::g_square_momentum, {K::kAdagrad, K::kRowwiseAdagrad}},
      {"eps", &OptimizerConfig::eps, {K::kAdagrad, K::kRowwiseAdagrad, K::kAdam}},
      {"beta1", &OptimizerConfig::beta1, {K::kAdam}},
      {"beta2", &OptimizerConfig::beta2, {K::kAdam}},
  };
  for (const Parameter& parameter : parameters) {
    for (K kind : {K::kSgd, K::kAdagrad, K::kRowwiseAdagrad, K::kAdam}) {
      OptimizerConfig config = Optimizer(kind);
      config.*parameter.member = 0.5f;
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

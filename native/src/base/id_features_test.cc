#include "base/id_features.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <string>

#include "base/buffer.h"

namespace persia {
namespace {

const std::array<uint32_t, 4> kOffsets = {0, 2, 2, 3};
const std::array<uint64_t, 3> kIds = {7, 8, 9};
const std::array<uint32_t, 4> kNoOffsets = {0, 0, 0, 0};

IdFeatures Batch() {
  return {.batch_size = 3, .features = {{"age", kOffsets, kIds}, {"education", kNoOffsets, {}}}};
}

Buffer Encoded(const IdFeatures& batch) {
  auto bytes = EncodeIdFeatures(batch);
  EXPECT_TRUE(bytes.ok()) << bytes.status().ToString();
  Buffer buffer(bytes->size());
  std::memcpy(buffer.data(), bytes->data(), bytes->size());
  return buffer;
}

StatusCode EncodeCode(const IdFeatures& batch) { return EncodeIdFeatures(batch).status().code(); }

TEST(IdFeatures, RoundTrip) {
  const Buffer message = Encoded(Batch());
  const auto decoded = DecodeIdFeatures(message.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value().batch_size, 3u);
  ASSERT_EQ(decoded.value().features.size(), 2u);
  const IdFeature& age = decoded.value().features[0];
  EXPECT_EQ(age.name, "age");
  EXPECT_TRUE(std::equal(age.ids.begin(), age.ids.end(), kIds.begin(), kIds.end()));
  EXPECT_TRUE(std::equal(age.offsets.begin(), age.offsets.end(), kOffsets.begin(), kOffsets.end()));
  EXPECT_EQ(decoded.value().features[1].name, "education");
  EXPECT_TRUE(decoded.value().features[1].ids.empty());
}

IdFeatures WeightedBatch(std::span<const float> weights) {
  return {.batch_size = 3, .features = {{"age", kOffsets, kIds, weights}}};
}

TEST(IdFeatures, WeightsRoundTripBesideFeaturesWithoutThem) {
  const std::array<float, 3> weights = {0.5f, -1.0f, 0.0f};
  IdFeatures batch = WeightedBatch(weights);
  batch.features.push_back({"education", kNoOffsets, {}});
  const Buffer message = Encoded(batch);
  const auto decoded = DecodeIdFeatures(message.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  const auto found = decoded.value().features[0].weights;
  EXPECT_TRUE(std::equal(found.begin(), found.end(), weights.begin(), weights.end()));
  EXPECT_TRUE(decoded.value().features[1].weights.empty());
}

TEST(IdFeatures, RefusesWeightsThatDoNotFitOrAreNotFinite) {
  const std::array<float, 2> too_few = {1, 2};
  EXPECT_EQ(EncodeCode(WeightedBatch(too_few)), StatusCode::kInvalidArgument);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const std::array<float, 3> weights = {1, bad, 2};
    const Status status = EncodeIdFeatures(WeightedBatch(weights)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("'age'"), std::string::npos) << status.message();
  }
}

// Readers that do not know weights take batches without them, whose flags are a reserved word.
TEST(IdFeatures, WithoutWeightsTheVersionIsTheFirst) {
  Buffer message = Encoded(Batch());
  const uint32_t first = 1, reserved = 1;
  EXPECT_EQ(std::memcmp(message.data() + 4, &first, sizeof(first)), 0);
  std::memcpy(message.data() + 20, &reserved, sizeof(reserved));
  const auto decoded = DecodeIdFeatures(message.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value().features[0].ids.size(), 3u);
  EXPECT_TRUE(decoded.value().features[0].weights.empty());
}

TEST(IdFeatures, UnknownFlagsAreCorruption) {
  const std::array<float, 3> weights = {0.5f, -1.0f, 0.0f};
  Buffer message = Encoded(WeightedBatch(weights));
  const uint32_t flags = 2;
  std::memcpy(message.data() + 20, &flags, sizeof(flags));
  EXPECT_EQ(DecodeIdFeatures(message.span()).status().code(), StatusCode::kCorruption);
}

TEST(IdFeatures, EveryTruncationIsCorruption) {
  const std::array<float, 3> weights = {0.5f, -1.0f, 0.0f};
  const Buffer weighted = Encoded(WeightedBatch(weights));
  for (size_t size = 0; size < weighted.size(); ++size) {
    const auto decoded = DecodeIdFeatures(weighted.span().first(size));
    EXPECT_EQ(decoded.status().code(), StatusCode::kCorruption) << size;
  }
  const Buffer message = Encoded(Batch());
  for (size_t size = 0; size < message.size(); ++size) {
    const auto decoded = DecodeIdFeatures(message.span().first(size));
    EXPECT_EQ(decoded.status().code(), StatusCode::kCorruption) << size;
  }
}

TEST(IdFeatures, BytesLeftOverAreCorruption) {
  const Buffer message = Encoded(Batch());
  Buffer longer(message.size() + 8);
  std::memset(longer.data(), 0, longer.size());
  std::memcpy(longer.data(), message.data(), message.size());
  EXPECT_EQ(DecodeIdFeatures(longer.span()).status().code(), StatusCode::kCorruption);
}

TEST(IdFeatures, RefusesWrongMagicAndVersion) {
  for (const size_t position : {0u, 4u}) {
    Buffer message = Encoded(Batch());
    message.data()[position] ^= std::byte{0xff};
    EXPECT_EQ(DecodeIdFeatures(message.span()).status().code(), StatusCode::kCorruption);
  }
}

TEST(IdFeatures, HugeCountsAllocateNothing) {
  Buffer message = Encoded(Batch());
  const uint32_t num_features = UINT32_MAX;
  std::memcpy(message.data() + 8, &num_features, sizeof(num_features));
  EXPECT_EQ(DecodeIdFeatures(message.span()).status().code(), StatusCode::kCorruption);
}

TEST(IdFeatures, RefusesOffsetsThatDoNotFit) {
  const std::array<uint32_t, 4> not_from_zero = {1, 2, 2, 3};
  const std::array<uint32_t, 4> decreasing = {0, 3, 2, 3};
  const std::array<uint32_t, 4> too_short = {0, 1, 2, 2};
  for (const auto& offsets : {not_from_zero, decreasing, too_short}) {
    EXPECT_EQ(EncodeCode({.batch_size = 3, .features = {{"age", offsets, kIds}}}),
              StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(EncodeCode({.batch_size = 2, .features = {{"age", kOffsets, kIds}}}),
            StatusCode::kInvalidArgument);
}

TEST(IdFeatures, RefusesBadBatches) {
  EXPECT_EQ(EncodeCode({.batch_size = 3, .features = {}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(EncodeCode({.batch_size = 3, .features = {{"", kOffsets, kIds}}}),
            StatusCode::kInvalidArgument);
  const auto twice = EncodeIdFeatures(
      {.batch_size = 3, .features = {{"age", kOffsets, kIds}, {"age", kOffsets, kIds}}});
  EXPECT_EQ(twice.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(twice.status().message().find("'age'"), std::string::npos);
  const std::vector<uint32_t> offsets(kMaxBatchSize + 2, 0);
  EXPECT_EQ(EncodeCode({.batch_size = kMaxBatchSize + 1, .features = {{"age", offsets, {}}}}),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace persia

#include "base/id_features.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
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

TEST(IdFeatures, EveryTruncationIsCorruption) {
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

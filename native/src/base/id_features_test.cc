#include "base/id_features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/bytes.h"
#include "base/hash.h"

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

// As older builds wrote it, in version 1 and, with weights, 2.
Buffer OldMessage(const IdFeatures& batch, uint32_t version) {
  ByteWriter writer;
  for (const uint32_t field : {0x42444950u, version, uint32_t(batch.features.size())}) {
    writer.Put(field);
  }
  writer.Put(batch.batch_size);
  for (const IdFeature& feature : batch.features) {
    writer.Put(static_cast<uint32_t>(feature.name.size()));
    writer.Put(version == 1 || !feature.weights.empty() ? 1u : 0u);  // 1 is reserved in version 1
    writer.Put(uint64_t{feature.ids.size()});
    writer.PutString(feature.name);
    writer.PutArray(feature.offsets);
    writer.PutArray(feature.ids);
    if (!feature.weights.empty()) writer.PutArray(feature.weights);
  }
  Buffer buffer(writer.size());
  std::memcpy(buffer.data(), writer.span().data(), writer.size());
  return buffer;
}

TEST(IdFeatures, ReadsOlderVersions) {
  const Buffer first = OldMessage(Batch(), 1);
  const auto decoded = DecodeIdFeatures(first.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_TRUE(std::ranges::equal(decoded.value().features[0].ids, kIds));
  EXPECT_TRUE(decoded.value().features[0].weights.empty());
  const std::array<float, 3> weights = {0.5f, -1.0f, 0.0f};
  const Buffer second = OldMessage(WeightedBatch(weights), 2);
  const auto weighted = DecodeIdFeatures(second.span());
  ASSERT_TRUE(weighted.ok()) << weighted.status().ToString();
  EXPECT_TRUE(std::ranges::equal(weighted.value().features[0].weights, weights));
}

struct Column {
  std::vector<uint32_t> offsets;
  std::vector<uint64_t> ids;
};

// One ID a sample: `id(sample)`.
template <typename Id>
Column OneEach(uint32_t batch_size, Id id) {
  Column column;
  for (uint32_t i = 0; i <= batch_size; ++i) column.offsets.push_back(i);
  for (uint32_t i = 0; i < batch_size; ++i) column.ids.push_back(id(i));
  return column;
}

size_t ExpectRoundTrip(const Column& column) {
  const auto batch_size = static_cast<uint32_t>(column.offsets.size() - 1);
  const Buffer message = Encoded({batch_size, {{"age", column.offsets, column.ids}}});
  const auto decoded = DecodeIdFeatures(message.span());
  EXPECT_TRUE(decoded.ok()) << decoded.status().ToString();
  if (!decoded.ok()) return 0;
  EXPECT_TRUE(std::ranges::equal(decoded.value().features[0].ids, column.ids));
  EXPECT_TRUE(std::ranges::equal(decoded.value().features[0].offsets, column.offsets));
  return message.size();
}

TEST(IdFeatures, IdsTakeTheFewestBytes) {
  constexpr uint32_t kSize = 1000;
  constexpr size_t kHead = 16 + 32 + 8 + 8;  // with the name and padding
  for (uint32_t width = 1; width <= 8; ++width) {
    const uint64_t greatest = UINT64_MAX >> (64 - 8 * width);
    const uint64_t least = width == 8 ? 0 : 1ull << 60;
    const auto column = OneEach(kSize, [&](uint64_t i) {
      return least + (i == 0 ? greatest : i == 1 ? 0 : SignHash(i) & greatest);
    });
    EXPECT_LE(ExpectRoundTrip(column), kHead + kSize * width) << width;
  }
  // Few distinct ones of 8 bytes: a byte for the number of each.
  const auto repeated = OneEach(kSize, [](uint64_t i) { return SignHash(i % 7); });
  EXPECT_LE(ExpectRoundTrip(repeated), kHead + 7 * 8 + kSize);
  const auto more = OneEach(kSize, [](uint64_t i) { return SignHash(i % 300); });
  EXPECT_LE(ExpectRoundTrip(more), kHead + 300 * 8 + 2 * kSize);
  EXPECT_LE(ExpectRoundTrip(OneEach(kSize, [](uint64_t) { return UINT64_MAX; })), kHead + kSize);
  ExpectRoundTrip({{0, 0, 3, 3}, {5, 5, 1ull << 40}});
  ExpectRoundTrip({{0}, {}});
}

// Of 40 IDs with 4 distinct ones of 8 bytes.
Buffer Numbered() {
  const auto column = OneEach(40, [](uint64_t i) { return SignHash(i % 4); });
  return Encoded({40, {{"age", column.offsets, column.ids}}});
}

// Of all features together.
TEST(IdFeatures, UnpackedIdsHaveABound) {
  const auto column = OneEach(40, [](uint64_t i) { return SignHash(i % 4); });
  const Buffer message =
      Encoded({40, {{"age", column.offsets, column.ids}, {"height", column.offsets, column.ids}}});
  auto decoded = DecodeIdFeatures(message.span(), 2 * 40 * 8);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->storage_bytes, 2u * 40 * 8);
  const Status refused = DecodeIdFeatures(message.span(), 2 * 40 * 8 - 1).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused.ToString();
}

TEST(IdFeatures, NumbersMayStayAsTheyAreSent) {
  const auto column = OneEach(40, [](uint64_t i) { return SignHash(i % 4); });
  const Buffer message = Numbered();
  auto decoded = DecodeIdFeatures(message.span(), kMaxIdBytes, Numbering::kKeep);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  const IdFeature& feature = decoded->features[0];
  EXPECT_EQ(feature.ids.size(), 4u);
  ASSERT_EQ(feature.numbers.size(), 40u);
  EXPECT_EQ(feature.num_ids(), 40u);
  for (size_t i = 0; i < 40; ++i) EXPECT_EQ(feature.ids[feature.numbers[i]], column.ids[i]);
  EXPECT_EQ(decoded->storage_bytes, 4u * 8 + 40 * 4);
  // IDs that were sent as they are have no numbers.
  const Buffer plain = Encoded(Batch());
  auto all = DecodeIdFeatures(plain.span(), kMaxIdBytes, Numbering::kKeep);
  ASSERT_TRUE(all.ok());
  EXPECT_TRUE(all->features[0].numbers.empty());
  EXPECT_EQ(all->features[0].num_ids(), kIds.size());
}

// With numbers kept, an ID may take 12 bytes.
TEST(IdFeatures, KeptNumbersCountToTheBound) {
  const Buffer message = Numbered();
  constexpr uint64_t kBytes = 4 * 8 + 40 * 4;
  EXPECT_TRUE(DecodeIdFeatures(message.span(), kBytes, Numbering::kKeep).ok());
  const Status refused = DecodeIdFeatures(message.span(), kBytes - 1, Numbering::kKeep).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused.ToString();
}

// Plans are made of distinct IDs, in their order.
TEST(IdFeatures, NumbersInAnotherOrderOrOfUnusedIdsAreExpanded) {
  constexpr size_t kNumbers = 16 + 32 + 8 + 4 * 8;
  const auto column = OneEach(40, [](uint64_t i) { return SignHash(i % 4); });
  const std::array<std::array<uint8_t, 4>, 4> cases = {
      {{1, 0, 2, 3}, {0, 1, 2, 2}, {0, 1, 3, 3}, {1, 1, 2, 3}}};
  for (const auto& changed : cases) {
    Buffer message = Numbered();
    std::byte* numbers = message.data() + kNumbers;
    for (size_t i = 0; i < 40; ++i) numbers[i] = std::byte{changed[size_t(numbers[i])]};
    auto decoded = DecodeIdFeatures(message.span(), 40 * 8, Numbering::kKeep);
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    const IdFeature& feature = decoded->features[0];
    EXPECT_TRUE(feature.numbers.empty());
    ASSERT_EQ(feature.ids.size(), 40u);
    for (size_t i = 0; i < 40; ++i) EXPECT_EQ(feature.ids[i], column.ids[changed[i % 4]]);
    const Status refused = DecodeIdFeatures(message.span(), 40 * 8 - 1, Numbering::kKeep).status();
    EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  }
  Buffer message = Numbered();
  message.data()[kNumbers + 39] = std::byte{4};
  EXPECT_EQ(DecodeIdFeatures(message.span(), kMaxIdBytes, Numbering::kKeep).status().code(),
            StatusCode::kCorruption);
}

TEST(IdFeatures, MalformedWidthsAndNumbersAreCorruption) {
  constexpr size_t kFlags = 16 + 4, kNumIds = 16 + 8, kNumDistinct = 16 + 24, kRest = 16 + 32 + 8;
  const auto code_with = [](size_t place, uint64_t value, size_t num_bytes) {
    Buffer message = Numbered();
    std::memcpy(message.data() + place, &value, num_bytes);
    return DecodeIdFeatures(message.span()).status().code();
  };
  ASSERT_TRUE(DecodeIdFeatures(Numbered().span()).ok());
  for (const uint8_t width : {0, 9, 255}) {
    EXPECT_EQ(code_with(kFlags + 1, width, 1), StatusCode::kCorruption) << int{width};
  }
  EXPECT_EQ(code_with(kFlags + 2, 1, 1), StatusCode::kCorruption);
  EXPECT_EQ(code_with(kFlags, 8, 1), StatusCode::kCorruption);
  for (const uint64_t count : {uint64_t{0}, uint64_t{41}, UINT64_MAX, uint64_t{5}, uint64_t{3}}) {
    EXPECT_EQ(code_with(kNumDistinct, count, 8), StatusCode::kCorruption) << count;
  }
  for (const uint64_t count : {uint64_t{0}, uint64_t{1} << 61, UINT64_MAX}) {
    EXPECT_EQ(code_with(kNumIds, count, 8), StatusCode::kCorruption) << count;
  }
  EXPECT_EQ(code_with(kRest + 4 * 8 + 39, 4, 1), StatusCode::kCorruption) << "a number of 4 IDs";
  EXPECT_EQ(code_with(kRest + 4 * 8 + 39, 3, 1), StatusCode::kOk);
  Buffer message = Numbered();
  for (size_t size = 0; size < message.size(); ++size) {
    EXPECT_EQ(DecodeIdFeatures(message.span().first(size)).status().code(), StatusCode::kCorruption)
        << size;
  }
}

TEST(IdFeatures, UnknownFlagsAreCorruption) {
  const std::array<float, 3> weights = {0.5f, -1.0f, 0.0f};
  Buffer message = Encoded(WeightedBatch(weights));
  message.data()[20] |= std::byte{16};
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

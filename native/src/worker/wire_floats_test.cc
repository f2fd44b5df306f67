// What 16 bits lose, against the bounds that the header states; and messages that carry them.
#include "worker/wire_floats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/message_test_util.h"
#include "worker/embeddings_message.h"
#include "worker/worker_protocol.h"

namespace persia::worker {
namespace {

constexpr WireDtype kNarrow[] = {WireDtype::kFloat16, WireDtype::kBfloat16};

std::vector<float> ThereAndBack(WireDtype dtype, const std::vector<float>& values) {
  const float unit = WireUnit(dtype, values);
  EXPECT_TRUE(IsWireUnit(unit)) << unit;
  std::vector<uint16_t> narrow(values.size());
  Narrow(dtype, values, unit, narrow.data());
  std::vector<float> wide(values.size());
  Widen(dtype, narrow, unit, wide.data());
  return wide;
}

// Magnitudes over 40 binary orders, about `center`.
std::vector<float> Spread(std::mt19937& rng, int center) {
  std::normal_distribution<float> normal;
  std::vector<float> values(3000);
  for (float& value : values) {
    value = std::ldexp(normal(rng), center - static_cast<int>(rng() % 40));
  }
  return values;
}

TEST(WireFloatsTest, ErrorsStayBelowTheStatedBounds) {
  std::mt19937 rng(1);
  for (const int center : {-60, -20, 0, 15, 100}) {
    const std::vector<float> values = Spread(rng, center);
    double max = 0;
    for (const float value : values) max = std::max(max, std::abs(double{value}));
    const auto half = ThereAndBack(WireDtype::kFloat16, values);
    const auto brain = ThereAndBack(WireDtype::kBfloat16, values);
    for (size_t i = 0; i < values.size(); ++i) {
      const double exact = values[i], magnitude = std::abs(exact);
      ASSERT_LE(std::abs(half[i] - exact),
                std::max(std::ldexp(magnitude, -11), std::ldexp(max, -39)))
          << exact << " of " << max;
      ASSERT_LE(std::abs(brain[i] - exact), std::ldexp(magnitude, -8)) << exact;
    }
  }
}

TEST(WireFloatsTest, ExtremesNeitherOverflowNorVanish) {
  const float greatest = std::ldexp(1.999f, 127);
  EXPECT_NEAR(ThereAndBack(WireDtype::kFloat16, {greatest})[0] / greatest, 1.0, 1e-3);
  const float least = std::numeric_limits<float>::min();
  EXPECT_EQ(ThereAndBack(WireDtype::kFloat16, {least})[0], least);
  for (const WireDtype dtype : kNarrow) {
    EXPECT_EQ(ThereAndBack(dtype, {0.0f, -0.0f}), (std::vector<float>{0.0f, -0.0f}));
    EXPECT_TRUE(ThereAndBack(dtype, {}).empty());
  }
}

// So that what is not finite is still seen, and skipped, where gradients arrive.
TEST(WireFloatsTest, NanAndInfinitiesStayWhatTheyAre) {
  for (const WireDtype dtype : kNarrow) {
    const auto found = ThereAndBack(dtype, {std::numeric_limits<float>::quiet_NaN(), 1.0f,
                                            -std::numeric_limits<float>::infinity()});
    EXPECT_TRUE(std::isnan(found[0]));
    EXPECT_EQ(found[1], 1.0f);
    EXPECT_EQ(found[2], -std::numeric_limits<float>::infinity());
  }
}

TEST(WireFloatsTest, UnitsAreChecked) {
  for (const float bad : {0.0f, -1.0f, 3.0f, std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), 1e-45f}) {
    EXPECT_FALSE(IsWireUnit(bad)) << bad;
  }
}

TEST(WireFloatsTest, NamesAndNumbers) {
  EXPECT_EQ(ParseWireDtype("bfloat16").value(), WireDtype::kBfloat16);
  EXPECT_EQ(ToWireDtype(1).value(), WireDtype::kFloat16);
  EXPECT_EQ(ParseWireDtype("fp8").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ToWireDtype(3).status().code(), StatusCode::kInvalidArgument);
}

Buffer Body(float scale, const std::vector<SlotGradient>& gradients, WireDtype dtype) {
  return testing::ToBuffer(
      testing::EncodeToBytes(GradientsRequest{{1, 2}, scale, dtype, gradients}));
}

// Gradients as small as those of a large batch, an odd number of rows so that padding is needed,
// and a skipped slot between.
TEST(NarrowGradientsTest, SurviveTheWire) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal(0, 1e-7f);
  std::vector<float> rows(15);
  for (float& element : rows) element = normal(rng);
  const std::vector<SlotGradient> gradients = {
      {.slot = "a", .num_rows = 5, .dim = 3, .rows = rows.data()},
      {.slot = "skipped", .skipped = true},
      {.slot = "b", .num_rows = 1, .dim = 1, .rows = rows.data()},
  };
  for (const WireDtype dtype : kNarrow) {
    const Buffer body = Body(8.0f, gradients, dtype);
    const auto decoded = GradientsRequest::Decode(body.span());
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    const auto& found = decoded.value().gradients;
    ASSERT_EQ(found.size(), 3u);
    EXPECT_TRUE(found[1].skipped);
    const auto expected = ThereAndBack(dtype, rows);
    EXPECT_EQ(std::vector<float>(found[0].rows, found[0].rows + 15), expected);
    EXPECT_NEAR(found[2].rows[0] / rows[0], 1.0, 0.004);
    for (size_t size = 0; size < body.size(); ++size) {
      EXPECT_EQ(GradientsRequest::Decode(body.span().first(size)).status().code(),
                StatusCode::kCorruption);
    }
  }
}

TEST(NarrowGradientsTest, DamagedBytesAreRefusedOrHarmless) {
  const std::vector<float> rows = {1.0f, 2.0f};
  const std::vector<SlotGradient> gradients = {
      {.slot = "a", .num_rows = 1, .dim = 2, .rows = rows.data()}};
  const Buffer body = Body(1.0f, gradients, WireDtype::kFloat16);
  for (size_t i = 0; i < body.size(); ++i) {
    for (const uint8_t value : {0x00, 0x01, 0x02, 0x03, 0x7f, 0x80, 0xff}) {
      Buffer damaged(body.size());
      std::memcpy(damaged.data(), body.data(), body.size());
      damaged.data()[i] = std::byte{value};
      const auto decoded = GradientsRequest::Decode(damaged.span());
      EXPECT_TRUE(decoded.ok() || decoded.status().code() == StatusCode::kCorruption) << i;
    }
  }
}

TEST(NarrowEmbeddingsTest, WhatIsNoMessageIsRefused) {
  EXPECT_EQ(NarrowEmbeddings(Buffer(16), WireDtype::kFloat16).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace persia::worker

// Initial values through RowPolicy: which distribution, its moments and bounds, and the same values
// on every machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/hash.h"
#include "store/row_policy.h"

namespace persia::store {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Initializer Normal(float mean, float stddev, float lower = -kInfinity, float upper = kInfinity) {
  return {.lower = lower,
          .upper = upper,
          .seed = 5,
          .kind = InitializerKind::kNormal,
          .mean = mean,
          .stddev = stddev};
}

std::vector<float> Values(const Initializer& initializer, uint32_t dim, uint64_t num_signs) {
  RowConfig config;
  config.initializer = initializer;
  EXPECT_TRUE(config.Validate().ok()) << config.Validate().ToString();
  const RowPolicy rules(config);
  std::vector<float> values(num_signs * dim);
  for (uint64_t sign = 0; sign < num_signs; ++sign) {
    rules.Initialize(sign, {values.data() + sign * dim, nullptr, nullptr, dim});
  }
  return values;
}

struct Moments {
  double mean = 0, stddev = 0;
};

Moments MomentsOf(const std::vector<float>& values) {
  double sum = 0, squares = 0;
  for (const float value : values) sum += value;
  const double mean = sum / static_cast<double>(values.size());
  for (const float value : values) squares += (value - mean) * (value - mean);
  return {mean, std::sqrt(squares / static_cast<double>(values.size()))};
}

constexpr uint64_t kSigns = 40'000;
constexpr uint32_t kDim = 16;
constexpr double kError = 5.0 / 800;  // five standard errors, in standard deviations

TEST(InitialValuesTest, HaveTheMomentsOfTheirDistribution) {
  Initializer uniform = {.lower = -0.5f, .upper = 1.5f};
  Initializer xavier_uniform = {.lower = -std::sqrt(3.0f), .upper = std::sqrt(3.0f)};
  xavier_uniform.scaled_by_dim = true;
  Initializer xavier_normal = Normal(0, 1);
  xavier_normal.scaled_by_dim = true;
  const struct {
    Initializer initializer;
    double mean, stddev;
  } cases[] = {
      {uniform, 0.5, 2 / std::sqrt(12.0)},
      {xavier_uniform, 0, 0.25},
      {xavier_normal, 0, 0.25},
      {Normal(0.3f, 0.01f), 0.3, 0.01},
      // Of a standard normal distribution cut at two standard deviations.
      {Normal(0, 1, -2, 2), 0, 0.8796},
      // Of its upper half.
      {Normal(0, 1, 0, kInfinity), std::sqrt(2 / std::acos(-1.0)), 0.6028},
  };
  for (const auto& c : cases) {
    const Moments found = MomentsOf(Values(c.initializer, kDim, kSigns));
    EXPECT_NEAR(found.mean, c.mean, kError * c.stddev);
    EXPECT_NEAR(found.stddev, c.stddev, kError * c.stddev);
  }
}

TEST(InitialValuesTest, StayWithinTheirBounds) {
  const auto values = Values(Normal(0.1f, 1, -0.2f, 0.3f), kDim, 4000);
  const auto [least, largest] = std::minmax_element(values.begin(), values.end());
  EXPECT_GE(*least, -0.2f);
  EXPECT_LE(*largest, 0.3f);
  EXPECT_EQ(Values({.lower = 0.7f, .upper = 0.7f}, 3, 1), (std::vector<float>{0.7f, 0.7f, 0.7f}));
}

TEST(InitialValuesTest, RowsAndElementsAreIndependent) {
  const auto values = Values(Normal(0, 1), kDim, kSigns);
  double next_element = 0, next_row = 0;
  for (size_t i = 0; i + kDim < values.size(); ++i) {
    next_element += values[i] * values[i + 1];
    next_row += values[i] * values[i + kDim];
  }
  EXPECT_NEAR(next_element / static_cast<double>(values.size()), 0, kError);
  EXPECT_NEAR(next_row / static_cast<double>(values.size()), 0, kError);
}

// The hash of the bits, computed once: another value means rows that begin differently than in
// every earlier version and on every other machine.
TEST(InitialValuesTest, AreTheSameInEveryVersionAndOnEveryMachine) {
  const auto hash = [](const std::vector<float>& values) {
    uint64_t sum = 0;
    for (const float value : values) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      sum = SignHash(sum ^ bits);
    }
    return sum;
  };
  EXPECT_EQ(hash(Values({.lower = -0.01f, .upper = 0.01f, .seed = 5}, 33, 100)),
            2716318903911944037u);
  EXPECT_EQ(hash(Values(Normal(0.25f, 0.5f), 33, 100)), 7594565327242817281u);
  EXPECT_EQ(hash(Values(Normal(0.25f, 0.5f, -0.5f, 1.5f), 33, 100)), 10699086322598812919u);
}

}  // namespace
}  // namespace persia::store

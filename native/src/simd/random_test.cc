// Random numbers of the kernels: their distribution, and what an element depends on.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "simd/kernels.h"

namespace persia::simd {
namespace {

TEST(UniformTest, FillsTheRangeEvenlyAndNeverReachesItsEnd) {
  const Kernels& k = ActiveKernels();
  constexpr size_t kCount = 1 << 20;
  std::vector<float> values(kCount);
  k.uniform(values.data(), 3, -0.5f, 1.5f, kCount);
  std::vector<int> buckets(20);
  double sum = 0;
  for (float value : values) {
    ASSERT_GE(value, -0.5f);
    ASSERT_LT(value, 1.5f);
    sum += value;
    ++buckets[static_cast<size_t>((value + 0.5f) * 10)];
  }
  EXPECT_NEAR(sum / kCount, 0.5, 0.003);
  for (int count : buckets) EXPECT_NEAR(count, kCount / 20, 6 * std::sqrt(kCount / 20));
}

TEST(UniformTest, UpperIsExcludedWhereRoundingWouldReachIt) {
  const float lower = 1.0f, upper = std::nextafter(std::nextafter(1.0f, 2.0f), 2.0f);
  std::vector<float> values(1000);
  ActiveKernels().uniform(values.data(), 5, lower, upper, values.size());
  for (float value : values) {
    ASSERT_GE(value, lower);
    ASSERT_LT(value, upper);
  }
  ActiveKernels().uniform(values.data(), 5, 0.25f, 0.25f, values.size());
  for (float value : values) ASSERT_EQ(value, 0.25f) << "an empty range is its bound";
}

TEST(UniformTest, AnElementDependsOnItsPlaceAndStreamOnly) {
  std::vector<float> longer(64), shorter(5), other(64);
  ActiveKernels().uniform(longer.data(), 9, 0, 1, 64);
  ActiveKernels().uniform(shorter.data(), 9, 0, 1, 5);
  ActiveKernels().uniform(other.data(), 10, 0, 1, 64);
  longer.resize(5);
  EXPECT_EQ(longer, shorter);
  other.resize(5);
  EXPECT_NE(other, shorter);
}

double NormalArea(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

TEST(NormalTest, QuantilesAreTheInverseOfTheArea) {
  const Kernels& k = ActiveKernels();
  for (double p = 0.5e-3; p < 1; p += 1e-3) {
    EXPECT_NEAR(NormalArea(k.normal_quantile(p)), p, 1e-7) << p;
    EXPECT_NEAR(k.normal_quantile(1 - p), -k.normal_quantile(p), 1e-9) << p;
  }
  for (double p = 1e-3; p > 1e-16; p /= 3) {  // relative: the tails keep their shape
    EXPECT_NEAR(NormalArea(k.normal_quantile(p)) / p, 1.0, 1e-5) << p;
  }
}

TEST(NormalTest, HasTheMomentsOfTheDistribution) {
  constexpr size_t kCount = 1 << 20;
  std::vector<float> values(kCount);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const NormalRule rule = {0.5, 2.0, static_cast<float>(-kInf), static_cast<float>(kInf), 0.0, 1.0};
  ActiveKernels().normal(values.data(), 3, rule, kCount);
  std::array<double, 5> moments = {};
  std::array<int, 3> within = {};
  for (const float value : values) {
    const double x = (value - 0.5) / 2.0;
    for (size_t m = 1; m <= 4; ++m) moments[m] += std::pow(x, m) / kCount;
    for (size_t s = 0; s < 3; ++s) within[s] += std::abs(x) < static_cast<double>(s + 1) ? 1 : 0;
  }
  // Five standard errors.
  const double error = 5 / std::sqrt(kCount);
  EXPECT_NEAR(moments[1], 0, error);
  EXPECT_NEAR(moments[2], 1, error * std::sqrt(2));
  EXPECT_NEAR(moments[3], 0, error * std::sqrt(15));
  EXPECT_NEAR(moments[4], 3, error * std::sqrt(96));
  for (size_t s = 0; s < 3; ++s) {
    const double share = 1 - 2 * NormalArea(-static_cast<double>(s + 1));
    EXPECT_NEAR(within[s] / static_cast<double>(kCount), share, error);
  }
}

TEST(NormalTest, StaysWithinItsBounds) {
  std::vector<float> values(1 << 16);
  const NormalRule rule = {
      0.0, 1.0, -0.5f, 2.0f, NormalArea(-0.5), NormalArea(2) - NormalArea(-0.5)};
  ActiveKernels().normal(values.data(), 8, rule, values.size());
  double sum = 0;
  for (const float value : values) {
    ASSERT_GE(value, -0.5f);
    ASSERT_LE(value, 2.0f);
    sum += value;
  }
  const auto density = [](double x) {
    return std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
  };
  const double mean = (density(-0.5) - density(2)) / rule.span;
  EXPECT_NEAR(sum / static_cast<double>(values.size()), mean, 5 / 256.0);
}

}  // namespace
}  // namespace persia::simd

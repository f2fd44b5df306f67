// Every kernel: the scalar variant against a double-precision formula, all others against the
// scalar one's bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "simd/kernels.h"

namespace persia::simd {
namespace {

constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 129, 1000};

constexpr SgdRule kSgd = {.lr = 0.1f, .weight_decay = 0.01f, .momentum = 0.9f};
constexpr AdagradRule kAdagrad = {
    .lr = 0.1f, .weight_decay = 0.01f, .g_square_momentum = 0.95f, .eps = 1e-10f};
constexpr AdamRule kAdam = {.step_size = 0.2f,
                            .second_scale = 1.5f,
                            .weight_decay = 0.01f,
                            .eps = 1e-8f,
                            .beta1 = 0.9f,
                            .one_minus_beta1 = 0.1f,
                            .beta2 = 0.999f,
                            .one_minus_beta2 = 0.001f};

// The arrays that a kernel reads or writes, starting `offset` floats away from a 64-byte boundary.
struct Operands {
  static constexpr size_t kFloats = 1040;

  Operands(size_t start, uint32_t seed) : offset(start) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto* array : {&w, &g, &a, &b}) {
      for (float& value : *array) value = normal(random);
    }
    for (auto* state : {&a, &b}) {  // sums of squares are not negative
      for (float& value : *state) value = std::abs(value);
    }
  }
  float* W() { return w.data() + offset; }
  float* G() { return g.data() + offset; }
  float* A() { return a.data() + offset; }
  float* B() { return b.data() + offset; }

  size_t offset;
  alignas(64) std::array<float, kFloats> w, g, a, b;
};

bool SameBits(const std::array<float, Operands::kFloats>& x,
              const std::array<float, Operands::kFloats>& y) {
  return std::memcmp(x.data(), y.data(), sizeof(x)) == 0;
}

struct Case {
  std::string name;
  std::function<void(const Kernels&, Operands&, size_t n)> run;
};

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"add", [](auto& k, auto& o, size_t n) { k.add(o.W(), o.G(), n); }},
      {"add_scaled", [](auto& k, auto& o, size_t n) { k.add_scaled(o.W(), o.G(), 0.3f, n); }},
      {"scale", [](auto& k, auto& o, size_t n) { k.scale(o.W(), 0.3f, n); }},
      {"clamp", [](auto& k, auto& o, size_t n) { k.clamp(o.W(), 0.5f, n); }},
      {"uniform", [](auto& k, auto& o, size_t n) { k.uniform(o.W(), 42, -0.01f, 0.02f, n); }},
      {"sgd", [](auto& k, auto& o, size_t n) { k.sgd(kSgd, o.W(), o.G(), n); }},
      {"sgd_momentum",
       [](auto& k, auto& o, size_t n) { k.sgd_momentum(kSgd, o.W(), o.A(), o.G(), n); }},
      {"adagrad", [](auto& k, auto& o, size_t n) { k.adagrad(kAdagrad, o.W(), o.A(), o.G(), n); }},
      {"rowwise_adagrad",
       [](auto& k, auto& o, size_t n) { k.rowwise_adagrad(kAdagrad, o.W(), o.A(), o.G(), n); }},
      {"adam", [](auto& k, auto& o, size_t n) { k.adam(kAdam, o.W(), o.A(), o.B(), o.G(), n); }},
  };
  return cases;
}

constexpr Isa kAllIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};

// Whole arrays are compared, so that a write beyond n shows too.
TEST(KernelsTest, VariantsGiveTheBitsOfTheScalarOne) {
  const Kernels& scalar = *KernelsFor(Isa::kScalar);
  for (Isa isa : kAllIsas) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    for (const Case& c : Cases()) {
      for (size_t n : kLengths) {
        for (size_t offset : {0, 1, 5}) {
          const Operands start(offset, 7);
          Operands expected = start, actual = start;
          c.run(scalar, expected, n);
          c.run(*kernels, actual, n);
          EXPECT_TRUE(SameBits(actual.w, expected.w) && SameBits(actual.a, expected.a) &&
                      SameBits(actual.b, expected.b))
              << kernels->name << " " << c.name << " n=" << n << " offset=" << offset;
          EXPECT_TRUE(SameBits(actual.g, start.g)) << c.name << " wrote to its gradient";
        }
      }
    }
  }
}

TEST(KernelsTest, WriteNothingBeyondN) {
  const Kernels& scalar = *KernelsFor(Isa::kScalar);
  for (const Case& c : Cases()) {
    for (size_t n : kLengths) {
      const Operands start(0, 7);
      Operands o = start;
      c.run(scalar, o, n);
      const size_t sums = c.name == "rowwise_adagrad" ? 1 : n;  // one sum whatever n is
      const size_t rest = Operands::kFloats - std::max(n, sums);
      auto same_tail = [rest](const auto& x, const auto& y) {
        return std::memcmp(x.end() - rest, y.end() - rest, rest * sizeof(float)) == 0;
      };
      EXPECT_TRUE(same_tail(o.w, start.w) && same_tail(o.a, start.a) && same_tail(o.b, start.b))
          << c.name << " n=" << n;
    }
  }
}

// Relative to the size of the terms, which is about 1 here.
constexpr double kTolerance = 2e-6;

TEST(ScalarKernelsTest, MatchDoublePrecisionFormulas) {
  const Kernels& k = *KernelsFor(Isa::kScalar);
  for (size_t n : kLengths) {
    for (const Case& c : Cases()) {
      const Operands start(0, 11);
      Operands x = start, o = start;
      c.run(k, o, n);
      double mean_square = 0;
      for (size_t i = 0; i < n; ++i) {
        const double grad = x.G()[i] + double{kAdagrad.weight_decay} * x.W()[i];
        mean_square += grad * grad / static_cast<double>(n);
      }
      for (size_t i = 0; i < n; ++i) {
        const double w = x.W()[i], g = x.G()[i], a = x.A()[i], b = x.B()[i];
        const double grad = g + double{kSgd.weight_decay} * w;
        double expected = w;
        if (c.name == "add") expected = w + g;
        if (c.name == "add_scaled") expected = w + double{0.3f} * g;
        if (c.name == "scale") expected = w * double{0.3f};
        if (c.name == "clamp") expected = std::min(0.5, std::max(-0.5, w));
        if (c.name == "uniform") continue;  // has its own test
        if (c.name == "sgd") expected = w - double{kSgd.lr} * grad;
        if (c.name == "sgd_momentum") {
          const double velocity = double{kSgd.momentum} * a + grad;
          EXPECT_NEAR(o.A()[i], velocity, kTolerance);
          expected = w - double{kSgd.lr} * velocity;
        }
        if (c.name == "adagrad") {
          const double sum = a * double{kAdagrad.g_square_momentum} + grad * grad;
          EXPECT_NEAR(o.A()[i], sum, kTolerance * (1 + sum));
          expected = w - double{kAdagrad.lr} * grad / (std::sqrt(sum) + double{kAdagrad.eps});
        }
        if (c.name == "rowwise_adagrad") {
          const double sum = x.A()[0] * double{kAdagrad.g_square_momentum} + mean_square;
          EXPECT_NEAR(o.A()[0], sum, kTolerance * (1 + sum));
          expected = w - double{kAdagrad.lr} * grad / (std::sqrt(sum) + double{kAdagrad.eps});
        }
        if (c.name == "adam") {
          const double m = double{kAdam.beta1} * a + double{kAdam.one_minus_beta1} * grad;
          const double v = double{kAdam.beta2} * b + double{kAdam.one_minus_beta2} * grad * grad;
          EXPECT_NEAR(o.A()[i], m, kTolerance);
          EXPECT_NEAR(o.B()[i], v, kTolerance);
          expected = w - double{kAdam.step_size} * m /
                             (std::sqrt(v) * double{kAdam.second_scale} + double{kAdam.eps});
        }
        EXPECT_NEAR(o.W()[i], expected, kTolerance * (1 + std::abs(expected)))
            << c.name << " n=" << n << " i=" << i;
      }
    }
  }
}

TEST(KernelsTest, AllFiniteFindsASingleBadElementAnywhere) {
  for (Isa isa : kAllIsas) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    for (size_t n : {1, 16, 37, 100}) {
      std::vector<float> values(n, std::numeric_limits<float>::max());
      EXPECT_TRUE(kernels->all_finite(values.data(), n));
      for (size_t bad = 0; bad < n; ++bad) {
        for (float value : {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), std::nanf("")}) {
          std::vector<float> spoilt = values;
          spoilt[bad] = value;
          EXPECT_FALSE(kernels->all_finite(spoilt.data(), n)) << kernels->name << " " << bad;
        }
      }
    }
    EXPECT_TRUE(kernels->all_finite(nullptr, 0));
  }
}

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

}  // namespace
}  // namespace persia::simd

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

constexpr float kStepSize = 0.2f, kSecondScale = 1.5f, kBound = 0.5f;
constexpr OptimizerConfig kSgd = {
    .kind = OptimizerKind::kSgd, .lr = 0.1f, .weight_decay = 0.01f, .momentum = 0.9f};
constexpr OptimizerConfig kAdagrad = {.kind = OptimizerKind::kAdagrad,
                                      .lr = 0.1f,
                                      .weight_decay = 0.01f,
                                      .g_square_momentum = 0.95f,
                                      .eps = 1e-10f};
constexpr OptimizerConfig kAdam = {.kind = OptimizerKind::kAdam,
                                   .lr = 0.1f,
                                   .weight_decay = 0.01f,
                                   .eps = 1e-8f,
                                   .beta1 = 0.9f,
                                   .beta2 = 0.999f};
constexpr OptimizerConfig kAdamW = {.kind = OptimizerKind::kAdamW,
                                    .lr = 0.1f,
                                    .weight_decay = 0.2f,
                                    .eps = 1e-8f,
                                    .beta1 = 0.9f,
                                    .beta2 = 0.999f};
constexpr OptimizerConfig kRmsprop = {.kind = OptimizerKind::kRmsprop,
                                      .lr = 0.1f,
                                      .weight_decay = 0.01f,
                                      .eps = 1e-3f,
                                      .alpha = 0.9f};
constexpr OptimizerConfig kAdadelta = {
    .kind = OptimizerKind::kAdadelta, .lr = 1.0f, .weight_decay = 0.01f, .eps = 1e-6f, .rho = 0.9f};
constexpr OptimizerConfig kFtrl = {
    .kind = OptimizerKind::kFtrl, .lr = 0.1f, .l1 = 1.0f, .l2 = 0.5f, .beta = 1.0f};
constexpr OptimizerConfig kLion = {
    .kind = OptimizerKind::kLion, .lr = 0.1f, .weight_decay = 0.2f, .beta1 = 0.9f, .beta2 = 0.99f};

// The same with other hyper-parameters, which choose another kernel.
constexpr OptimizerConfig With(OptimizerConfig config, float OptimizerConfig::* member,
                               float value) {
  config.*member = value;
  return config;
}
constexpr OptimizerConfig With(OptimizerConfig config, OptimizerKind kind) {
  config.kind = kind;
  return config;
}
constexpr float kRmspropMomentum = 0.8f, kDampening = 0.5f;
constexpr NormalRule kNormal = {
    .mean = 0.5, .stddev = 2.0, .lower = -2.0f, .upper = 3.0f, .first = 0.1, .span = 0.8};

// The arrays that a kernel reads or writes, starting `offset` floats away from a 64-byte boundary.
struct Operands {
  static constexpr size_t kFloats = 1040;

  Operands(size_t start, uint32_t seed) : offset(start) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto* array : {&w, &g, &a, &b, &c}) {
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
  float* C() { return c.data() + offset; }
  float* S() { return &s; }

  size_t offset;
  float s = 0;  // row-wise Adagrad's sum afterwards
  alignas(64) std::array<float, kFloats> w, g, a, b, c;
};

// Three rows, which overlap so that they fit; and a batch of them, as many as fit into an operand.
struct RowsOf {
  RowsOf(Operands& o, size_t n) : rows{o.G(), o.A(), o.B()} {
    for (size_t i = 0; i < 12 && (i + 1) * n <= 1000; ++i) numbers.push_back(i * 7 % 3);
  }
  std::vector<const float*> rows;
  std::vector<uint32_t> numbers;
};

bool SameBits(const std::array<float, Operands::kFloats>& x,
              const std::array<float, Operands::kFloats>& y) {
  return std::memcmp(x.data(), y.data(), sizeof(x)) == 0;
}

// Updates one row, made of o.W(), o.A(), o.B() and o.C() and taken apart again.
void Step(const Kernels& kernels, const OptimizerConfig& config, Operands& o, size_t n,
          float bound = 0.0f) {
  std::vector<float> row;
  uint32_t scalar;
  for (const float* part : {o.W(), o.A(), o.B(), o.C()}) row.insert(row.end(), part, part + n);
  std::memcpy(&scalar, o.A(), sizeof(scalar));
  const RowStep step = {row.data(), row.data() + n, o.G(), &scalar, kStepSize, kSecondScale};
  EXPECT_EQ(kernels.optimizer(config)(config, &step, 1, n, bound), 0u);
  std::copy_n(row.begin(), n, o.W());
  std::copy_n(row.begin() + static_cast<ptrdiff_t>(n), n, o.A());
  std::copy_n(row.begin() + static_cast<ptrdiff_t>(2 * n), n, o.B());
  std::copy_n(row.begin() + static_cast<ptrdiff_t>(3 * n), n, o.C());
  if (n > 0) std::memcpy(o.S(), &scalar, sizeof(scalar));
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
      {"clamp",
       [](auto& k, auto& o, size_t n) { Step(k, OptimizerConfig{.lr = 0.0f}, o, n, kBound); }},
      {"uniform", [](auto& k, auto& o, size_t n) { k.uniform(o.W(), 42, -0.01f, 0.02f, n); }},
      {"sgd", [](auto& k, auto& o,
                 size_t n) { Step(k, With(kSgd, &OptimizerConfig::momentum, 0.0f), o, n); }},
      {"sgd_momentum", [](auto& k, auto& o, size_t n) { Step(k, kSgd, o, n); }},
      {"adagrad", [](auto& k, auto& o, size_t n) { Step(k, kAdagrad, o, n); }},
      {"rowwise_adagrad",
       [](auto& k, auto& o, size_t n) {
         Step(k, With(kAdagrad, OptimizerKind::kRowwiseAdagrad), o, n);
       }},
      {"adam", [](auto& k, auto& o, size_t n) { Step(k, kAdam, o, n); }},
      {"sgd_nesterov",
       [](auto& k, auto& o, size_t n) {
         Step(k, With(kSgd, &OptimizerConfig::nesterov, 1.0f), o, n);
       }},
      {"sgd_dampened",
       [](auto& k, auto& o, size_t n) {
         Step(k, With(kSgd, &OptimizerConfig::dampening, kDampening), o, n);
       }},
      {"adamw", [](auto& k, auto& o, size_t n) { Step(k, kAdamW, o, n); }},
      {"adamax",
       [](auto& k, auto& o, size_t n) { Step(k, With(kAdam, OptimizerKind::kAdamax), o, n); }},
      {"rmsprop", [](auto& k, auto& o, size_t n) { Step(k, kRmsprop, o, n); }},
      {"rmsprop_momentum",
       [](auto& k, auto& o, size_t n) {
         Step(k, With(kRmsprop, &OptimizerConfig::momentum, kRmspropMomentum), o, n);
       }},
      {"rmsprop_centered",
       [](auto& k, auto& o, size_t n) {
         Step(k, With(kRmsprop, &OptimizerConfig::centered, 1.0f), o, n);
       }},
      {"rmsprop_centered_momentum",
       [](auto& k, auto& o, size_t n) {
         const auto centered = With(kRmsprop, &OptimizerConfig::centered, 1.0f);
         Step(k, With(centered, &OptimizerConfig::momentum, kRmspropMomentum), o, n);
       }},
      {"adadelta", [](auto& k, auto& o, size_t n) { Step(k, kAdadelta, o, n); }},
      {"ftrl", [](auto& k, auto& o, size_t n) { Step(k, kFtrl, o, n); }},
      {"lion", [](auto& k, auto& o, size_t n) { Step(k, kLion, o, n); }},
      {"normal", [](auto& k, auto& o, size_t n) { k.normal(o.W(), 42, kNormal, n); }},
  };
  return cases;
}

// Those that read more than one row; RowsTest says what they give.
const std::vector<Case>& CasesOfManyRows() {
  static const std::vector<Case> cases = {
      {"copy_rows",
       [](auto& k, auto& o, size_t n) {
         const RowsOf rows(o, n);
         k.pooling.copy_rows(o.W(), n, rows.rows.data(), rows.numbers.data(), rows.numbers.size(),
                             n);
       }},
      {"sum_bags",
       [](auto& k, auto& o, size_t n) {
         const RowsOf rows(o, n);
         k.pooling.sum_bags(o.W(), 0, rows.rows.data(), rows.numbers.data(), nullptr,
                            rows.numbers.size(), 1, n);
       }},
      {"sum_scaled",
       [](auto& k, auto& o, size_t n) {
         const RowsOf rows(o, n);
         const std::vector<float> factors = {0.3f, 1.0f, -2.0f};
         k.pooling.sum_scaled(o.W(), rows.rows.data(), factors.data(), rows.rows.size(), n);
       }},
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
    std::vector<Case> cases = Cases();
    cases.insert(cases.end(), CasesOfManyRows().begin(), CasesOfManyRows().end());
    for (const Case& c : cases) {
      for (size_t n : kLengths) {
        for (size_t offset : {0, 1, 5}) {
          const Operands start(offset, 7);
          Operands expected = start, actual = start;
          c.run(scalar, expected, n);
          c.run(*kernels, actual, n);
          EXPECT_TRUE(SameBits(actual.w, expected.w) && SameBits(actual.a, expected.a) &&
                      SameBits(actual.b, expected.b) && SameBits(actual.c, expected.c) &&
                      actual.s == expected.s)
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
      const size_t rest = Operands::kFloats - n;
      auto same_tail = [rest](const auto& x, const auto& y) {
        return std::memcmp(x.end() - rest, y.end() - rest, rest * sizeof(float)) == 0;
      };
      EXPECT_TRUE(same_tail(o.w, start.w) && same_tail(o.a, start.a) && same_tail(o.b, start.b) &&
                  same_tail(o.c, start.c))
          << c.name << " n=" << n;
    }
  }
}

// Relative to the size of the terms, which is about 1 here.
constexpr double kTolerance = 2e-6;

TEST(ScalarKernelsTest, MatchDoublePrecisionFormulas) {
  const Kernels& k = *KernelsFor(Isa::kScalar);
  for (size_t n : kLengths) {
    for (const Case& tested : Cases()) {
      const std::string& name = tested.name;
      const Operands start(0, 11);
      Operands x = start, o = start;
      tested.run(k, o, n);
      double mean_square = 0;
      for (size_t i = 0; i < n; ++i) {
        const double grad = x.G()[i] + double{kAdagrad.weight_decay} * x.W()[i];
        mean_square += grad * grad / static_cast<double>(n);
      }
      for (size_t i = 0; i < n; ++i) {
        const double w = x.W()[i], g = x.G()[i], a = x.A()[i], b = x.B()[i], c = x.C()[i];
        const double grad = g + double{kSgd.weight_decay} * w;
        double expected = w;
        if (name == "add") expected = w + g;
        if (name == "add_scaled") expected = w + double{0.3f} * g;
        if (name == "scale") expected = w * double{0.3f};
        if (name == "clamp") expected = std::min(0.5, std::max(-0.5, w));
        if (name == "uniform" || name == "normal") continue;  // have their own tests
        if (name == "sgd") expected = w - double{kSgd.lr} * grad;
        if (name == "sgd_momentum") {
          const double velocity = double{kSgd.momentum} * a + grad;
          EXPECT_NEAR(o.A()[i], velocity, kTolerance);
          expected = w - double{kSgd.lr} * velocity;
        }
        if (name == "adagrad") {
          const double sum = a * double{kAdagrad.g_square_momentum} + grad * grad;
          EXPECT_NEAR(o.A()[i], sum, kTolerance * (1 + sum));
          expected = w - double{kAdagrad.lr} * grad / (std::sqrt(sum) + double{kAdagrad.eps});
        }
        if (name == "rowwise_adagrad") {
          const double sum = x.A()[0] * double{kAdagrad.g_square_momentum} + mean_square;
          EXPECT_NEAR(o.s, sum, kTolerance * (1 + sum));
          expected = w - double{kAdagrad.lr} * grad / (std::sqrt(sum) + double{kAdagrad.eps});
        }
        if (name == "adam") {
          const double m = double{kAdam.beta1} * a + (1 - double{kAdam.beta1}) * grad;
          const double v = double{kAdam.beta2} * b + (1 - double{kAdam.beta2}) * grad * grad;
          EXPECT_NEAR(o.A()[i], m, kTolerance);
          EXPECT_NEAR(o.B()[i], v, kTolerance);
          expected =
              w - double{kStepSize} * m / (std::sqrt(v) * double{kSecondScale} + double{kAdam.eps});
        }
        if (name == "sgd_nesterov") {
          const double velocity = double{kSgd.momentum} * a + grad;
          EXPECT_NEAR(o.A()[i], velocity, kTolerance);
          expected = w - double{kSgd.lr} * (grad + double{kSgd.momentum} * velocity);
        }
        if (name == "sgd_dampened") {
          const double take = x.A()[0] == 0.0f ? 1.0 : 0.5;
          const double velocity = double{kSgd.momentum} * a + take * grad;
          EXPECT_NEAR(o.A()[i], velocity, kTolerance);
          expected = w - double{kSgd.lr} * velocity;
        }
        if (name == "adamw") {
          const double m = double{kAdam.beta1} * a + (1 - double{kAdam.beta1}) * g;
          const double v = double{kAdam.beta2} * b + (1 - double{kAdam.beta2}) * g * g;
          expected =
              w * (1 - double{kAdamW.lr} * double{kAdamW.weight_decay}) -
              double{kStepSize} * m / (std::sqrt(v) * double{kSecondScale} + double{kAdam.eps});
        }
        if (name == "adamax") {
          const double m = double{kAdam.beta1} * a + (1 - double{kAdam.beta1}) * grad;
          const double u = std::max(double{kAdam.beta2} * b, std::abs(grad) + double{kAdam.eps});
          EXPECT_NEAR(o.B()[i], u, kTolerance * (1 + u));
          expected = w - double{kStepSize} * m / u;
        }
        if (name.starts_with("rmsprop")) {
          const bool has_momentum = name.ends_with("momentum");
          const double alpha = double{kRmsprop.alpha}, rest = (1 - double{kRmsprop.alpha});
          const double square = alpha * a + rest * grad * grad;
          const double mean = alpha * (has_momentum ? c : b) + rest * grad;
          const bool centered = name.find("centered") != std::string::npos;
          const double variance = centered ? std::max(0.0, square - mean * mean) : square;
          if (centered && variance < 1e-3) continue;  // rounding is all that is left of it
          double step = grad / (std::sqrt(variance) + double{kRmsprop.eps});
          if (has_momentum) {
            step += double{kRmspropMomentum} * b;
            EXPECT_NEAR(o.B()[i], step, 1e-3 * (1 + std::abs(step)));
          }
          EXPECT_NEAR(o.A()[i], square, kTolerance * (1 + square));
          expected = w - double{kRmsprop.lr} * step;
          EXPECT_NEAR(o.W()[i], expected, (centered ? 1e-3 : kTolerance) * (1 + std::abs(step)))
              << name << " n=" << n << " i=" << i;
          continue;
        }
        if (name == "adadelta") {
          const double square =
              double{kAdadelta.rho} * a + (1 - double{kAdadelta.rho}) * grad * grad;
          const double step =
              std::sqrt((b + double{kAdadelta.eps}) / (square + double{kAdadelta.eps})) * grad;
          const double moved =
              double{kAdadelta.rho} * b + (1 - double{kAdadelta.rho}) * step * step;
          EXPECT_NEAR(o.B()[i], moved, kTolerance * (1 + moved));
          expected = w - step;
        }
        if (name == "ftrl") {
          const double root = std::sqrt(b + g * g);
          const double z = a + g - (root - std::sqrt(b)) * 10.0 * w;
          EXPECT_NEAR(o.A()[i], z, 10 * kTolerance * (1 + std::abs(z)));
          const double sign = z < 0 ? -1 : 1;
          expected = std::abs(z) <= 1.0 ? 0.0 : -(z - sign) / ((1.0 + root) * 10.0 + 0.5);
        }
        if (name == "lion") {
          const double direction = double{kLion.beta1} * a + (1 - double{kLion.beta1}) * g;
          if (std::abs(direction) < 1e-6) continue;  // rounding decides the sign
          EXPECT_NEAR(o.A()[i], double{kLion.beta2} * a + (1 - double{kLion.beta2}) * g,
                      kTolerance);
          expected =
              w - double{kLion.lr} * ((direction < 0 ? -1 : 1) + double{kLion.weight_decay} * w);
        }
        EXPECT_NEAR(o.W()[i], expected, kTolerance * (1 + std::abs(expected)))
            << name << " n=" << n << " i=" << i;
      }
    }
  }
}

// Where neither moment nor gradient says where to go, a weight only decays.
TEST(KernelsTest, LionDoesNotStepWhereItsDirectionIsZero) {
  for (Isa isa : kAllIsas) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    std::vector<float> row = {1.0f, -2.0f, 0.0f, 0.0f};  // two weights, two moments
    const std::vector<float> gradient = {0.0f, -0.0f};
    const RowStep step = {row.data(), row.data() + 2, gradient.data(), nullptr, 0, 0};
    EXPECT_EQ(kernels->optimizer(kLion)(kLion, &step, 1, 2, 0.0f), 0u);
    EXPECT_EQ(row, (std::vector<float>{0.98f, -1.96f, 0.0f, 0.0f})) << kernels->name;
  }
}

TEST(KernelsTest, MaxMagnitudeFindsTheGreatestElementAnywhere) {
  for (Isa isa : kAllIsas) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    EXPECT_EQ(kernels->max_magnitude(nullptr, 0), 0.0f);
    for (size_t n : {1, 16, 37, 100}) {
      for (size_t greatest = 0; greatest < n; ++greatest) {
        std::vector<float> values(n, -1.5f);
        values[greatest] = greatest % 2 == 0 ? 2.0f : -2.0f;
        EXPECT_EQ(kernels->max_magnitude(values.data(), n), 2.0f) << kernels->name;
        values[greatest] = -std::numeric_limits<float>::infinity();
        EXPECT_TRUE(std::isinf(kernels->max_magnitude(values.data(), n))) << kernels->name;
        values[greatest] = -std::nanf("");
        EXPECT_TRUE(std::isnan(kernels->max_magnitude(values.data(), n))) << kernels->name;
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

TEST(RowsTest, ARowWithANonFiniteGradientIsLeftAsItIs) {
  for (Isa isa : kAllIsas) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      for (const size_t n : {1, 16, 17, 64}) {
        std::vector<float> rows(4 * n, 1.0f), gradients(2 * n, 0.5f);
        gradients[n - 1] = bad;
        const auto step = [&](float* row, const float* gradient) {
          return RowStep{row, row + n, gradient, nullptr, 0, 0};
        };
        const RowStep steps[] = {step(rows.data(), gradients.data()),
                                 step(rows.data() + 2 * n, gradients.data() + n)};
        EXPECT_EQ(kernels->optimizer(kAdagrad)(kAdagrad, steps, 2, n, 10.0f), 1u);
        EXPECT_EQ(std::count(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(2 * n), 1.0f),
                  static_cast<ptrdiff_t>(2 * n));
        EXPECT_NE(rows[2 * n], 1.0f) << "the other one is updated";
      }
    }
  }
}

TEST(RowsTest, SumsAreThoseOfALoopInOrder) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const size_t n : kLengths) {
    std::vector<std::vector<float>> rows(5, std::vector<float>(n));
    std::vector<const float*> pointers;
    for (auto& row : rows) {
      for (float& value : row) value = normal(random);
      pointers.push_back(row.data());
    }
    const std::vector<uint32_t> numbers = {4, 0, 0, 3, 1, 4, 2, 2, 1};
    std::vector<float> expected(n, 0.0f), scaled(n, 0.0f), sum(n), copies(2 * n + 1, 7.0f);
    for (const uint32_t number : numbers) {
      for (size_t i = 0; i < n; ++i) expected[i] += rows[number][i];
    }
    const std::vector<float> factors = {0.5f, 2.0f, -1.0f, 0.1f, 3.0f};
    for (size_t row = 0; row < rows.size(); ++row) {
      for (size_t i = 0; i < n; ++i) scaled[i] += factors[row] * rows[row][i];
    }
    const Kernels& k = ActiveKernels();
    k.pooling.sum_bags(sum.data(), 0, pointers.data(), numbers.data(), nullptr, numbers.size(), 1,
                       n);
    EXPECT_EQ(sum, expected) << n;
    k.pooling.sum_scaled(sum.data(), pointers.data(), factors.data(), rows.size(), n);
    EXPECT_EQ(sum, scaled) << n;
    k.pooling.sum_scaled(sum.data(), pointers.data(), nullptr, 1, n);
    EXPECT_EQ(sum, rows[0]) << n;
    k.pooling.sum_scaled(sum.data(), pointers.data(), nullptr, 0, n);
    EXPECT_EQ(sum, std::vector<float>(n, 0.0f)) << "of nothing";
    k.pooling.copy_rows(copies.data(), n + 1, pointers.data(), numbers.data(), 2, n);
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(copies[n + 1 + i], rows[0][i]);
    EXPECT_EQ(copies[n], 7.0f) << "what lies between two rows is left alone";
  }
}

// For measurements of one instruction set on a processor that has more.
TEST(KernelsTest, AVariantIsChosenByName) {
  EXPECT_STREQ(ChooseKernels("scalar").name, "scalar");
  if (KernelsFor(Isa::kAvx2) != nullptr) {
    EXPECT_STREQ(ChooseKernels("avx2").name, "avx2");
  }
  const Kernels& fastest = ChooseKernels(nullptr);
  testing::internal::CaptureStderr();
  EXPECT_EQ(&ChooseKernels("mmx"), &fastest);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("PERSIA_SIMD=mmx"), std::string::npos);
}

}  // namespace
}  // namespace persia::simd

// Every optimizer, through the store and over many steps,
// against torch.optim's formulas in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "store/store_test_util.h"

namespace persia::store {
namespace {

struct OptimizerCase {
  std::string name;
  TrainConfig config;
};

TrainConfig Config(OptimizerKind kind, void (*set)(OptimizerConfig&) = nullptr) {
  TrainConfig config;
  config.optimizer.kind = kind;
  config.weight_bound = 0.0f;
  if (set != nullptr) set(config.optimizer);
  return config;
}

std::vector<OptimizerCase> Cases() {
  using K = OptimizerKind;
  return {
      {"Sgd", Config(K::kSgd)},
      {"SgdDecay", Config(K::kSgd, [](auto& c) { c.weight_decay = 0.1f; })},
      {"SgdMomentum", Config(K::kSgd,
                             [](auto& c) {
                               c.momentum = 0.9f;
                               c.weight_decay = 0.01f;
                             })},
      {"Adagrad", Config(K::kAdagrad)},
      {"AdagradAll", Config(K::kAdagrad,
                            [](auto& c) {
                              c.weight_decay = 0.1f;
                              c.initial_accumulator_value = 0.1f;
                              c.g_square_momentum = 0.9f;
                              c.eps = 1e-3f;
                            })},
      {"RowwiseAdagrad", Config(K::kRowwiseAdagrad)},
      {"RowwiseAdagradAll", Config(K::kRowwiseAdagrad,
                                   [](auto& c) {
                                     c.weight_decay = 0.1f;
                                     c.initial_accumulator_value = 0.1f;
                                     c.g_square_momentum = 0.9f;
                                   })},
      {"Adam", Config(K::kAdam, [](auto& c) { c.eps = 1e-8f; })},
      {"AdamAll", Config(K::kAdam,
                         [](auto& c) {
                           c.weight_decay = 0.1f;
                           c.beta1 = 0.8f;
                           c.beta2 = 0.95f;
                           c.eps = 1e-4f;
                         })},
      {"SgdNesterov", Config(K::kSgd,
                             [](auto& c) {
                               c.momentum = 0.9f;
                               c.nesterov = 1.0f;
                               c.weight_decay = 0.01f;
                             })},
      {"SgdDampened", Config(K::kSgd,
                             [](auto& c) {
                               c.momentum = 0.8f;
                               c.dampening = 0.5f;
                             })},
      {"AdamW", Config(K::kAdamW,
                       [](auto& c) {
                         c.eps = 1e-8f;
                         c.weight_decay = 0.1f;
                       })},
      {"Adamax", Config(K::kAdamax,
                        [](auto& c) {
                          c.eps = 1e-8f;
                          c.weight_decay = 0.1f;
                        })},
      {"Rmsprop", Config(K::kRmsprop, [](auto& c) { c.eps = 1e-8f; })},
      {"RmspropMomentum", Config(K::kRmsprop,
                                 [](auto& c) {
                                   c.eps = 1e-3f;
                                   c.momentum = 0.5f;
                                   c.weight_decay = 0.1f;
                                 })},
      {"RmspropCentered", Config(K::kRmsprop,
                                 [](auto& c) {
                                   c.eps = 1e-3f;
                                   c.alpha = 0.9f;
                                   c.centered = 1.0f;
                                 })},
      {"RmspropAll", Config(K::kRmsprop,
                            [](auto& c) {
                              c.eps = 1e-2f;
                              c.alpha = 0.9f;
                              c.momentum = 0.5f;
                              c.centered = 1.0f;
                              c.weight_decay = 0.1f;
                            })},
      {"Adadelta", Config(K::kAdadelta,
                          [](auto& c) {
                            c.lr = 1.0f;
                            c.eps = 1e-6f;
                            c.weight_decay = 0.1f;
                          })},
      {"Ftrl", Config(K::kFtrl, [](auto& c) { c.initial_accumulator_value = 0.1f; })},
      {"FtrlAll", Config(K::kFtrl,
                         [](auto& c) {
                           c.lr = 0.1f;
                           c.beta = 1.0f;
                           c.l1 = 2.0f;
                           c.l2 = 0.5f;
                         })},
      {"Lion", Config(K::kLion,
                      [](auto& c) {
                        c.lr = 1e-3f;
                        c.beta2 = 0.99f;
                      })},
      {"LionAll", Config(K::kLion,
                         [](auto& c) {
                           c.lr = 1e-2f;
                           c.weight_decay = 0.1f;
                           c.beta1 = 0.8f;
                         })},
  };
}

// One row in double precision.
struct ReferenceRow {
  ReferenceRow(const OptimizerConfig& config, const std::vector<float>& initial)
      : c(config), w(initial.begin(), initial.end()) {
    first.assign(w.size(), c.initial_accumulator_value);
    second.assign(w.size(), 0);
    third.assign(w.size(), 0);
  }

  void Step(const float* gradient) {
    ++step;
    std::vector<double> g(w.size());
    double mean_square = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      g[i] = gradient[i];
      if (c.kind == OptimizerKind::kAdamW || c.kind == OptimizerKind::kLion) {
        w[i] *= 1 - double{c.lr} * double{c.weight_decay};
      } else {
        g[i] += c.weight_decay * w[i];
      }
      mean_square += g[i] * g[i] / static_cast<double>(w.size());
    }
    for (size_t i = 0; i < w.size(); ++i) w[i] -= Delta(i, g[i], mean_square);
  }

  double Delta(size_t i, double g, double mean_square) {
    switch (c.kind) {
      case OptimizerKind::kSgd:
        first[i] = step == 1 ? g : c.momentum * first[i] + (1 - double{c.dampening}) * g;
        return c.lr * (c.nesterov != 0 ? g + c.momentum * first[i] : first[i]);
      case OptimizerKind::kAdagrad:
      case OptimizerKind::kRowwiseAdagrad: {
        const double square = c.kind == OptimizerKind::kAdagrad ? g * g : mean_square;
        first[i] = first[i] * c.g_square_momentum + square;
        return c.lr * g / (std::sqrt(first[i]) + c.eps);
      }
      case OptimizerKind::kAdam:
      case OptimizerKind::kAdamW: {
        first[i] = c.beta1 * first[i] + (1 - double{c.beta1}) * g;
        second[i] = c.beta2 * second[i] + (1 - double{c.beta2}) * g * g;
        const double m = first[i] / (1 - std::pow(double{c.beta1}, step));
        const double v = second[i] / (1 - std::pow(double{c.beta2}, step));
        return c.lr * m / (std::sqrt(v) + c.eps);
      }
      case OptimizerKind::kAdamax: {
        first[i] = c.beta1 * first[i] + (1 - double{c.beta1}) * g;
        second[i] = std::max(c.beta2 * second[i], std::abs(g) + c.eps);
        return c.lr / (1 - std::pow(double{c.beta1}, step)) * first[i] / second[i];
      }
      case OptimizerKind::kRmsprop: {
        first[i] = c.alpha * first[i] + (1 - double{c.alpha}) * g * g;
        second[i] = c.alpha * second[i] + (1 - double{c.alpha}) * g;
        const double mean = c.centered != 0 ? second[i] : 0;
        third[i] = c.momentum * third[i] + g / (std::sqrt(first[i] - mean * mean) + c.eps);
        return c.lr * third[i];
      }
      case OptimizerKind::kAdadelta: {
        first[i] = c.rho * first[i] + (1 - double{c.rho}) * g * g;
        const double delta = std::sqrt(second[i] + c.eps) / std::sqrt(first[i] + c.eps) * g;
        second[i] = c.rho * second[i] + (1 - double{c.rho}) * delta * delta;
        return c.lr * delta;
      }
      case OptimizerKind::kFtrl: return w[i] - FtrlWeight(i, g);
      case OptimizerKind::kLion: {
        const double direction = c.beta1 * first[i] + (1 - double{c.beta1}) * g;
        first[i] = c.beta2 * first[i] + (1 - double{c.beta2}) * g;
        return c.lr * (direction > 0 ? 1 : direction < 0 ? -1 : 0);
      }
    }
    return 0;
  }

  // Algorithm 1 of McMahan et al. (2013), first[i] being n and second[i] being z.
  double FtrlWeight(size_t i, double g) {
    const double alpha = c.lr, sigma = (std::sqrt(first[i] + g * g) - std::sqrt(first[i])) / alpha;
    second[i] += g - sigma * w[i];
    first[i] += g * g;
    if (std::abs(second[i]) <= c.l1) return 0;
    const double sign = second[i] < 0 ? -1 : 1;
    return -(second[i] - sign * c.l1) / ((c.beta + std::sqrt(first[i])) / alpha + c.l2);
  }

  OptimizerConfig c;
  std::vector<double> w, first, second, third;
  int step = 0;
};

class OptimizerTest : public testing::TestWithParam<OptimizerCase> {};

TEST_P(OptimizerTest, FollowsTheReferenceOverManySteps) {
  constexpr int kSteps = 300;
  for (uint32_t dim : {1u, 7u, 16u, 33u}) {
    auto store = MakeStore({.capacity = 100, .num_internal_shards = 2}, GetParam().config);
    // Sign 2 joins in every third step only: its step count is its own.
    const std::vector<uint64_t> both = {1, 2}, one = {1};
    const auto initial = Lookup(*store, both, dim);
    ReferenceRow row1(GetParam().config.optimizer, {initial.begin(), initial.begin() + dim});
    ReferenceRow row2(GetParam().config.optimizer, {initial.begin() + dim, initial.end()});
    std::mt19937 random(dim);
    std::normal_distribution<float> normal(0.1f, 1.0f);
    for (int step = 0; step < kSteps; ++step) {
      const bool has_both = step % 3 == 0;
      std::vector<float> gradients((has_both ? 2 : 1) * dim);
      for (float& g : gradients) g = normal(random);
      Update(*store, has_both ? both : one, dim, gradients);
      row1.Step(gradients.data());
      if (has_both) row2.Step(gradients.data() + dim);
    }
    const auto rows = Peek(*store, both, dim);
    for (uint32_t i = 0; i < dim; ++i) {
      EXPECT_NEAR(rows[i], row1.w[i], 2e-5 * (1 + std::abs(row1.w[i]))) << "dim " << dim;
      EXPECT_NEAR(rows[dim + i], row2.w[i], 2e-5 * (1 + std::abs(row2.w[i]))) << "dim " << dim;
    }
  }
}

// A step from what the row has gives what it gives in double precision, to one unit of the type:
// rounded up or down. The state beside it is not rounded, or the next steps would tell.
class NarrowRowsOptimizerTest : public testing::TestWithParam<OptimizerCase> {};

double UnitAt(double value, RowDtype dtype) {
  const int mantissa_bits = dtype == RowDtype::kFloat16 ? 10 : 7;
  const int least_exponent = dtype == RowDtype::kFloat16 ? -14 : -126;
  int exponent;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, std::max(exponent - 1, least_exponent) - mantissa_bits);
}

TEST_P(NarrowRowsOptimizerTest, EachStepIsTheReferencesToOneUnit) {
  for (const RowDtype dtype : {RowDtype::kFloat16, RowDtype::kBfloat16}) {
    for (const uint32_t dim : {1u, 7u, 16u}) {
      auto store = MakeStore({.capacity = 100, .num_internal_shards = 2, .row_dtype = dtype},
                             GetParam().config);
      ReferenceRow row(GetParam().config.optimizer, Lookup(*store, {1}, dim));
      std::mt19937 random(dim);
      std::normal_distribution<float> normal(0.1f, 1.0f);
      for (int step = 0; step < 100; ++step) {
        std::vector<float> gradient(dim);
        for (float& g : gradient) g = normal(random);
        const auto before = Peek(*store, {1}, dim);
        row.w.assign(before.begin(), before.end());
        Update(*store, {1}, dim, gradient);
        row.Step(gradient.data());
        const auto after = Peek(*store, {1}, dim);
        for (uint32_t i = 0; i < dim; ++i) {
          const double tolerance =
              UnitAt(std::abs(row.w[i]) * 1.0001, dtype) + 2e-5 * (1 + std::abs(row.w[i]));
          ASSERT_NEAR(after[i], row.w[i], tolerance) << "dim " << dim << ", step " << step;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, NarrowRowsOptimizerTest, testing::ValuesIn(Cases()),
                         [](const auto& param) { return param.param.name; });

INSTANTIATE_TEST_SUITE_P(Kinds, OptimizerTest, testing::ValuesIn(Cases()),
                         [](const auto& param) { return param.param.name; });

// Beyond the tabulated bias corrections they are computed; the seam must not show.
TEST(AdamTest, ALongLivedRowKeepsItsStepSize) {
  TrainConfig config = Config(OptimizerKind::kAdam, [](auto& c) {
    c.beta2 = 0.99999f;
    c.lr = 1e-4f;
  });
  auto store = MakeStore({.capacity = 10, .num_internal_shards = 1}, config);
  ReferenceRow reference(config.optimizer, Lookup(*store, {1}, 1));
  for (int step = 0; step < 20'000; ++step) {
    const float gradient = step % 7 < 3 ? 1.0f : -0.5f;
    Update(*store, {1}, 1, {gradient});
    reference.Step(&gradient);
  }
  EXPECT_NEAR(Peek(*store, {1}, 1)[0], reference.w[0], 1e-3);
}

}  // namespace
}  // namespace persia::store

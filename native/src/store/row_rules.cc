#include "store/row_rules.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace persia::store {
namespace {

// With beta2 = 0.999 the corrections are 1 in float from step 17,000 on.
constexpr uint32_t kTabulatedSteps = 1 << 14;

// SplitMix64's finaliser: every input bit reaches every output bit.
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

simd::AdamRule MakeAdamRule(const OptimizerConfig& c) {
  return {.step_size = 0,
          .second_scale = 0,
          .weight_decay = c.weight_decay,
          .eps = c.eps,
          .beta1 = c.beta1,
          .one_minus_beta1 = static_cast<float>(1.0 - double{c.beta1}),
          .beta2 = c.beta2,
          .one_minus_beta2 = static_cast<float>(1.0 - double{c.beta2})};
}

}  // namespace

RowRules::RowRules(const TrainConfig& config)
    : config_(config),
      kernels_(simd::ActiveKernels()),
      sgd_{.lr = config.optimizer.lr,
           .weight_decay = config.optimizer.weight_decay,
           .momentum = config.optimizer.momentum},
      adagrad_{.lr = config.optimizer.lr,
               .weight_decay = config.optimizer.weight_decay,
               .g_square_momentum = config.optimizer.g_square_momentum,
               .eps = config.optimizer.eps},
      adam_(MakeAdamRule(config.optimizer)) {
  if (config.optimizer.kind != OptimizerKind::kAdam) return;
  corrections_.reserve(kTabulatedSteps);
  for (uint32_t step = 1; step <= kTabulatedSteps; ++step) {
    corrections_.push_back(ComputeCorrection(step));
  }
}

RowShape RowRules::ShapeFor(uint32_t dim) const {
  const OptimizerKind kind = config_.optimizer.kind;
  const bool rowwise = kind == OptimizerKind::kRowwiseAdagrad;
  return {.dim = dim,
          .state_floats = rowwise ? 0 : config_.optimizer.StateFloats(dim),
          .has_scalar = rowwise || kind == OptimizerKind::kAdam};
}

uint64_t RowRules::StreamOf(uint64_t sign) const {
  return Mix(Mix(config_.initializer.seed + 0x9e3779b97f4a7c15u) + sign);
}

bool RowRules::Admits(uint64_t sign) const {
  constexpr uint64_t kAdmission = 0xd1b54a32d192ed03u;  // apart from the initial values
  const uint64_t bits = Mix(StreamOf(sign) ^ kAdmission) >> 11;
  return static_cast<double>(bits) * 0x1p-53 < double{config_.admit_probability};
}

void RowRules::Initialize(uint64_t sign, const RowView& row) const {
  const Initializer& init = config_.initializer;
  kernels_.uniform(row.values, StreamOf(sign), init.lower, init.upper, row.dim);
  InitializeState(row);
}

void RowRules::InitializeState(const RowView& row) const {
  const OptimizerConfig& optimizer = config_.optimizer;
  const float initial = optimizer.initial_accumulator_value;  // 0 unless Adagrad
  const RowShape shape = ShapeFor(row.dim);
  std::fill_n(row.values + row.dim, shape.state_floats, initial);
  // Row-wise Adagrad's sum, or Adam's step count, which is 0 like the bits of 0.0f.
  if (shape.has_scalar) *row.scalar = std::bit_cast<uint32_t>(initial);
}

void RowRules::ApplyGradient(const RowView& row, const float* gradient) const {
  float* w = row.values;
  const size_t dim = row.dim;
  switch (config_.optimizer.kind) {
    case OptimizerKind::kSgd:
      if (sgd_.momentum == 0.0f) {
        kernels_.sgd(sgd_, w, gradient, dim);
      } else {
        kernels_.sgd_momentum(sgd_, w, w + dim, gradient, dim);
      }
      break;
    case OptimizerKind::kAdagrad: kernels_.adagrad(adagrad_, w, w + dim, gradient, dim); break;
    case OptimizerKind::kRowwiseAdagrad: ApplyRowwiseAdagrad(row, gradient); break;
    case OptimizerKind::kAdam: ApplyAdam(row, gradient); break;
  }
  if (config_.weight_bound > 0) kernels_.clamp(w, config_.weight_bound, dim);
}

void RowRules::ApplyRowwiseAdagrad(const RowView& row, const float* gradient) const {
  auto sum = std::bit_cast<float>(*row.scalar);
  kernels_.rowwise_adagrad(adagrad_, row.values, &sum, gradient, row.dim);
  *row.scalar = std::bit_cast<uint32_t>(sum);
}

void RowRules::ApplyAdam(const RowView& row, const float* gradient) const {
  uint32_t& step = *row.scalar;
  if (step < UINT32_MAX) ++step;
  const AdamCorrection correction =
      step <= corrections_.size() ? corrections_[step - 1] : ComputeCorrection(step);
  simd::AdamRule rule = adam_;
  rule.step_size = correction.step_size;
  rule.second_scale = correction.second_scale;
  float* m = row.values + row.dim;
  kernels_.adam(rule, row.values, m, m + row.dim, gradient, row.dim);
}

RowRules::AdamCorrection RowRules::ComputeCorrection(uint32_t step) const {
  const OptimizerConfig& c = config_.optimizer;
  const double first = 1.0 - std::pow(double{c.beta1}, step);
  const double second = 1.0 - std::pow(double{c.beta2}, step);
  return {.step_size = static_cast<float>(double{c.lr} / first),
          .second_scale = static_cast<float>(1.0 / std::sqrt(second))};
}

}  // namespace persia::store

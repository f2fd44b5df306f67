// The optimizer's part of a train config: which rule, and its hyper-parameters.
//
// Two tables describe everything but the arithmetic (simd/optimizers.inc). kOptimizers has a row
// for each optimizer: its name, hyper-parameters, defaults and state. OptimizerFields() has a row
// for each hyper-parameter: its name, range and whether rows depend on it. Checks, encoding, names
// in YAML, row shapes and what may change while rows exist all follow from these two.
//
// To add an optimizer: a kind and its row of kOptimizers here, its kernel in simd/optimizers.inc,
// its class in persia/embedding/optim.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/status.h"

namespace persia {

enum class OptimizerKind : uint8_t {
  kSgd = 0,
  kAdagrad = 1,
  kRowwiseAdagrad = 2,
  kAdam = 3,
  kAdamW = 4,
  kRmsprop = 5,
  kAdadelta = 6,
  kAdamax = 7,
  kFtrl = 8,
  kLion = 9,
};
inline constexpr uint32_t kNumOptimizerKinds = 10;

// One flat set of hyper-parameters; Validate() refuses those that the kind does not have, so none
// is silently ignored. The rules are torch.optim's, for FTRL those of McMahan et al. (2013) and for
// Lion those of Chen et al. (2023), applied to the rows of a batch.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  float lr = 0.01f;
  float weight_decay = 0.0f;
  float momentum = 0.0f;
  float initial_accumulator_value = 0.0f;
  float g_square_momentum = 1.0f;
  float eps = 1e-10f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float dampening = 0.0f;
  float nesterov = 0.0f;
  float alpha = 0.99f;
  float centered = 0.0f;
  float rho = 0.9f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float beta = 0.0f;
  bool operator==(const OptimizerConfig&) const = default;

  // With the defaults of the kind's Python class.
  static OptimizerConfig Of(OptimizerKind kind);

  Status Validate() const;
  // Whether rows count their steps, or keep another 32-bit number beside their floats.
  bool HasScalar() const;
  // Floats of optimizer state; row-wise Adagrad's only one is the row's scalar.
  uint32_t StateFloats(uint32_t dim) const;
  const struct OptimizerTraits& traits() const;
};

enum class ValueRange : uint8_t {
  kPositive,     // above 0
  kNotNegative,  // 0 or above
  kDecay,        // 0 to below 1
  kShare,        // above 0, up to 1
  kFlag,         // 0 or 1
};

// What a row's 32-bit scalar holds, beside its floats.
enum class RowScalar : uint8_t {
  kNone,
  kSteps,        // the steps of the row, for bias correction: RowStep::step_size is filled in
  kAccumulator,  // the only state float, as its bits
  kIfDampened,   // whether the row has stepped, where there is dampening
};

struct OptimizerTraits {
  std::string_view name;
  std::array<float OptimizerConfig::*, 6> fields;
  uint32_t state_arrays;
  RowScalar scalar;
  uint32_t accumulator = 0;
  OptimizerConfig defaults;
};

// In the order of OptimizerKind.
inline constexpr OptimizerTraits kOptimizers[kNumOptimizerKinds] = {
    {.name = "sgd",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::momentum,
                &OptimizerConfig::dampening, &OptimizerConfig::nesterov},
     .state_arrays = 0,
     .scalar = RowScalar::kIfDampened,
     .defaults = {.kind = OptimizerKind::kSgd}},
    {.name = "adagrad",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay,
                &OptimizerConfig::initial_accumulator_value, &OptimizerConfig::g_square_momentum,
                &OptimizerConfig::eps},
     .state_arrays = 1,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kAdagrad, .initial_accumulator_value = 0.01f}},
    {.name = "rowwise_adagrad",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay,
                &OptimizerConfig::initial_accumulator_value, &OptimizerConfig::g_square_momentum,
                &OptimizerConfig::eps},
     .state_arrays = 0,
     .scalar = RowScalar::kAccumulator,
     .defaults = {.kind = OptimizerKind::kRowwiseAdagrad, .initial_accumulator_value = 0.01f}},
    {.name = "adam",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::eps,
                &OptimizerConfig::beta1, &OptimizerConfig::beta2},
     .state_arrays = 2,
     .scalar = RowScalar::kSteps,
     .defaults = {.kind = OptimizerKind::kAdam, .eps = 1e-8f}},
    {.name = "adamw",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::eps,
                &OptimizerConfig::beta1, &OptimizerConfig::beta2},
     .state_arrays = 2,
     .scalar = RowScalar::kSteps,
     .defaults = {.kind = OptimizerKind::kAdamW, .weight_decay = 0.01f, .eps = 1e-8f}},
    {.name = "rmsprop",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::momentum,
                &OptimizerConfig::eps, &OptimizerConfig::alpha, &OptimizerConfig::centered},
     .state_arrays = 1,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kRmsprop, .eps = 1e-8f}},
    {.name = "adadelta",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::eps,
                &OptimizerConfig::rho},
     .state_arrays = 2,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kAdadelta, .eps = 1e-6f}},
    {.name = "adamax",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::eps,
                &OptimizerConfig::beta1, &OptimizerConfig::beta2},
     .state_arrays = 2,
     .scalar = RowScalar::kSteps,
     .defaults = {.kind = OptimizerKind::kAdamax, .eps = 1e-8f}},
    {.name = "ftrl",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::initial_accumulator_value,
                &OptimizerConfig::l1, &OptimizerConfig::l2, &OptimizerConfig::beta},
     .state_arrays = 2,
     .scalar = RowScalar::kNone,
     .accumulator = 1,  // the first array is z
     .defaults = {.kind = OptimizerKind::kFtrl, .initial_accumulator_value = 0.1f}},
    {.name = "lion",
     .fields = {&OptimizerConfig::lr, &OptimizerConfig::weight_decay, &OptimizerConfig::beta1,
                &OptimizerConfig::beta2},
     .state_arrays = 1,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kLion, .lr = 1e-4f, .beta2 = 0.99f}},
};

// The kind must be a known one: Validate() says so.
inline const OptimizerTraits& OptimizerConfig::traits() const {
  return kOptimizers[static_cast<size_t>(kind)];
}

struct OptimizerField {
  std::string_view name;
  float OptimizerConfig::* member;
  ValueRange range;
  bool is_fixed;

  bool IsOf(OptimizerKind kind) const {
    const auto& fields = kOptimizers[static_cast<size_t>(kind)].fields;
    return std::find(fields.begin(), fields.end(), member) != fields.end();
  }
};

// In the order in which they are encoded.
std::span<const OptimizerField> OptimizerFields();

// "adagrad", ...: what configurations call it.
std::string_view OptimizerName(OptimizerKind kind);
std::optional<OptimizerKind> OptimizerOfName(std::string_view name);

}  // namespace persia

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

// The numbers are part of the wire format and of checkpoints: a new kind gets the next one, and
// none is used again.
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
// Kinds are 0 up to this: a decoder refuses every other number.
// Decoders and the Python stub follow from it.
inline constexpr uint32_t kNumOptimizerKinds = 10;

// One flat set of hyper-parameters; Validate() refuses those that the kind does not have, so none
// is silently ignored. The rules are torch.optim's, for FTRL those of McMahan et al. (2013) and for
// Lion those of Chen et al. (2023), applied to the rows of a batch.
// A plain value: copied freely, compared field by field. Servers compare the one that they have
// with one that is sent.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  // The step size; 0 or above. A schedule may take it down to 0, at which rows stay as they are.
  // With a slot's own optimizer the job's `lr_factor` multiplies it.
  float lr = 0.01f;
  // L2: added to the gradient before the rule sees it. For AdamW and Lion it is decoupled: the row
  // shrinks by lr * weight_decay instead.
  float weight_decay = 0.0f;
  // SGD and RMSprop. Not 0: one more state array, so it may not change to or from 0 while there are
  // rows.
  float momentum = 0.0f;
  // Adagrad and FTRL: where a new row's sum of squares begins. Above 0 it limits the first steps.
  float initial_accumulator_value = 0.0f;
  // Adagrad: accumulator = accumulator * this + g^2. 1 is the rule of the paper; below 1 the row
  // forgets.
  float g_square_momentum = 1.0f;
  // Keeps divisions finite. Outside the square root, as in torch; Adadelta has it inside.
  float eps = 1e-10f;
  // Adam, AdamW, Adamax, Lion: decay of the mean of gradients.
  float beta1 = 0.9f;
  // Adam, AdamW: decay of the mean of squares. Adamax: of the greatest magnitude. Lion: of its
  // momentum.
  float beta2 = 0.999f;
  // SGD with momentum: the share of a gradient that does not enter it. A row's first step is not
  // dampened, which is why such rows need a scalar.
  float dampening = 0.0f;
  // SGD with momentum and without dampening; 0 or 1.
  float nesterov = 0.0f;
  // RMSprop: decay of the mean of squares.
  float alpha = 0.99f;
  // RMSprop: divides by the variance instead of the mean of squares, which takes one more state
  // array; 0 or 1.
  float centered = 0.0f;
  // Adadelta: decay of both means.
  float rho = 0.9f;
  // FTRL: below this strength an element is exactly 0.
  float l1 = 0.0f;
  // FTRL: shrinks all elements.
  float l2 = 0.0f;
  // FTRL: added to the square root of the sum of squares, so that first steps are small.
  float beta = 0.0f;
  bool operator==(const OptimizerConfig&) const = default;

  // With the defaults of the kind's Python class, but for the learning rate. The kind must be
  // known.
  static OptimizerConfig Of(OptimizerKind kind);

  // kInvalidArgument names the field, its value and the range. A hyper-parameter that the kind does
  // not have must be at this struct's default, or a user would believe that it has an effect.
  Status Validate() const;
  // Whether rows count their steps, or keep another 32-bit number beside their floats.
  // Depends on fixed fields only, like StateFloats().
  bool HasScalar() const;
  // Floats of optimizer state; row-wise Adagrad's only one is the row's scalar.
  // Decides how long a row is in memory and in a checkpoint. It depends on fields that are
  // `is_fixed`, and on no other.
  uint32_t StateFloats(uint32_t dim) const;
  const struct OptimizerTraits& traits() const;
};

// All of them exclude NaN and infinity.
enum class ValueRange : uint8_t {
  kPositive,     // above 0
  kNotNegative,  // 0 or above
  kDecay,        // 0 to below 1
  kShare,        // above 0, up to 1
  kFlag,         // 0 or 1
};

// What a row's 32-bit scalar holds, beside its floats.
// A row has one such number or none, so that a rule that counts steps costs four bytes a row and
// not `dim` floats.
enum class RowScalar : uint8_t {
  kNone,
  kSteps,        // the steps of the row, for bias correction: RowStep::step_size is filled in
  kAccumulator,  // the only state float, as its bits
  kIfDampened,   // whether the row has stepped, where there is dampening
};

// Everything about a rule that is not arithmetic. The kernels read none of it: the store asks once
// per config and keeps what it needs.
struct OptimizerTraits {
  // What configurations call it: the `name` of YAML and of the Python classes.
  // As users write it; messages begin with it.
  std::string_view name;
  // The hyper-parameters that it has, in any order; the rest is null.
  std::array<float OptimizerConfig::*, 6> fields;
  // Of `dim` floats each, behind the embedding. Momentum and `centered` add one each.
  uint32_t state_arrays;
  // Where the row's 32-bit number comes from, if it has one at all: see HasScalar().
  RowScalar scalar;
  // The first array that begins at initial_accumulator_value. Those before it begin at 0.
  // FTRL is the one rule with both kinds of arrays: its z begins at 0, its sum of squares above.
  uint32_t accumulator = 0;
  // Those of the Python class, lr apart: a test compares the two.
  OptimizerConfig defaults;
};

// In the order of OptimizerKind.
// traits() and OptimizerField::IsOf() index it by the kind's number, so it has no gaps and
// no other order.
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

// A hyper-parameter as configurations and messages have it.
struct OptimizerField {
  std::string_view name;
  float OptimizerConfig::* member;
  // What Validate() holds the value to, and what its message then asks for.
  ValueRange range;
  // It may not change while there are rows, because their state, or its size, depends on it.
  bool is_fixed;

  // A search of at most six entries: for configs, not for rows.
  bool IsOf(OptimizerKind kind) const {
    const auto& fields = kOptimizers[static_cast<size_t>(kind)].fields;
    return std::find(fields.begin(), fields.end(), member) != fields.end();
  }
};

// In the order in which they are encoded.
// New ones are appended: the order is that of the train config on the wire and in checkpoints.
std::span<const OptimizerField> OptimizerFields();

// "adagrad", ...: what configurations call it.
// "unknown" for a number that is no kind, so that messages about bad input can use it.
std::string_view OptimizerName(OptimizerKind kind);
// None: there is no such optimizer. The caller lists those that there are.
std::optional<OptimizerKind> OptimizerOfName(std::string_view name);

}  // namespace persia

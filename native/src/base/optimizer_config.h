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
  float lr = 0.01f;                        // a schedule may take it down to 0
  float weight_decay = 0.0f;               // L2, added to the gradient; AdamW, Lion: decoupled
  float momentum = 0.0f;                   // SGD, RMSprop; one state float per element when not 0
  float initial_accumulator_value = 0.0f;  // Adagrad, FTRL
  float g_square_momentum = 1.0f;          // Adagrad: accumulator = accumulator * this + g^2
  float eps = 1e-10f;                      // outside the square root, as in torch; Adadelta: inside
  float beta1 = 0.9f;                      // Adam, AdamW, Adamax, Lion
  float beta2 = 0.999f;                    // Adam, AdamW, Adamax, Lion
  float dampening = 0.0f;                  // SGD with momentum
  float nesterov = 0.0f;                   // SGD with momentum; 0 or 1
  float alpha = 0.99f;                     // RMSprop: decay of the mean of squares
  float centered = 0.0f;                   // RMSprop: by the variance; 0 or 1
  float rho = 0.9f;                        // Adadelta: decay of both means
  float l1 = 0.0f;                         // FTRL
  float l2 = 0.0f;                         // FTRL
  float beta = 0.0f;                       // FTRL: added to the square root of the sum of squares
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

// The hyper-parameters, in the order in which they are encoded: the bits of
// OptimizerTraits::fields.
enum class Hyper : uint8_t {
  kLr,
  kWeightDecay,
  kMomentum,
  kInitialAccumulatorValue,
  kGSquareMomentum,
  kEps,
  kBeta1,
  kBeta2,
  kDampening,
  kNesterov,
  kAlpha,
  kCentered,
  kRho,
  kL1,
  kL2,
  kBeta,
};

template <typename... Hypers>
constexpr uint32_t HyperBits(Hypers... hypers) {
  return ((1u << static_cast<uint32_t>(hypers)) | ...);
}

// What a row's 32-bit scalar holds, beside its floats.
enum class RowScalar : uint8_t {
  kNone,
  kSteps,        // the steps of the row, for bias correction: RowStep::step_size is filled in
  kAccumulator,  // the only state float, as its bits
  kIfDampened,   // whether the row has stepped, where there is dampening
};

struct OptimizerTraits {
  std::string_view name;  // what configurations call it
  uint32_t fields;        // HyperBits() of those it has
  uint32_t state_arrays;  // of dim floats each; momentum and centered add one each
  RowScalar scalar;
  uint32_t accumulator = 0;  // the first array that begins at initial_accumulator_value, not at 0
  OptimizerConfig defaults;  // those of the Python class, lr apart
};

// In the order of OptimizerKind.
inline constexpr OptimizerTraits kOptimizers[kNumOptimizerKinds] = {
    {.name = "sgd",
     .fields = HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kMomentum, Hyper::kDampening,
                         Hyper::kNesterov),
     .state_arrays = 0,
     .scalar = RowScalar::kIfDampened,
     .defaults = {.kind = OptimizerKind::kSgd}},
    {.name = "adagrad",
     .fields = HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kInitialAccumulatorValue,
                         Hyper::kGSquareMomentum, Hyper::kEps),
     .state_arrays = 1,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kAdagrad, .initial_accumulator_value = 0.01f}},
    {.name = "rowwise_adagrad",
     .fields = HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kInitialAccumulatorValue,
                         Hyper::kGSquareMomentum, Hyper::kEps),
     .state_arrays = 0,
     .scalar = RowScalar::kAccumulator,
     .defaults = {.kind = OptimizerKind::kRowwiseAdagrad, .initial_accumulator_value = 0.01f}},
    {.name = "adam",
     .fields =
         HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kEps, Hyper::kBeta1, Hyper::kBeta2),
     .state_arrays = 2,
     .scalar = RowScalar::kSteps,
     .defaults = {.kind = OptimizerKind::kAdam, .eps = 1e-8f}},
    {.name = "adamw",
     .fields =
         HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kEps, Hyper::kBeta1, Hyper::kBeta2),
     .state_arrays = 2,
     .scalar = RowScalar::kSteps,
     .defaults = {.kind = OptimizerKind::kAdamW, .weight_decay = 0.01f, .eps = 1e-8f}},
    {.name = "rmsprop",
     .fields = HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kMomentum, Hyper::kEps,
                         Hyper::kAlpha, Hyper::kCentered),
     .state_arrays = 1,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kRmsprop, .eps = 1e-8f}},
    {.name = "adadelta",
     .fields = HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kEps, Hyper::kRho),
     .state_arrays = 2,
     .scalar = RowScalar::kNone,
     .defaults = {.kind = OptimizerKind::kAdadelta, .eps = 1e-6f}},
    {.name = "adamax",
     .fields =
         HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kEps, Hyper::kBeta1, Hyper::kBeta2),
     .state_arrays = 2,
     .scalar = RowScalar::kSteps,
     .defaults = {.kind = OptimizerKind::kAdamax, .eps = 1e-8f}},
    {.name = "ftrl",
     .fields = HyperBits(Hyper::kLr, Hyper::kInitialAccumulatorValue, Hyper::kL1, Hyper::kL2,
                         Hyper::kBeta),
     .state_arrays = 2,
     .scalar = RowScalar::kNone,
     .accumulator = 1,  // the first array is z
     .defaults = {.kind = OptimizerKind::kFtrl, .initial_accumulator_value = 0.1f}},
    {.name = "lion",
     .fields = HyperBits(Hyper::kLr, Hyper::kWeightDecay, Hyper::kBeta1, Hyper::kBeta2),
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
  Hyper hyper;
  ValueRange range;
  bool is_fixed;  // may not change while there are rows: their state depends on it

  bool IsOf(OptimizerKind kind) const {
    return (kOptimizers[static_cast<size_t>(kind)].fields & HyperBits(hyper)) != 0;
  }
};

// In the order in which they are encoded.
std::span<const OptimizerField> OptimizerFields();

// "adagrad", ...: what configurations call it.
std::string_view OptimizerName(OptimizerKind kind);
std::optional<OptimizerKind> OptimizerOfName(std::string_view name);

}  // namespace persia

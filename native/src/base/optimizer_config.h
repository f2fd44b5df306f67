// The optimizer's part of a train config: which rule, and its hyper-parameters.
//
// One table (OptimizerFields) says what each hyper-parameter is called, which optimizers have it
// and what values it may take; checks, encoding, names in YAML and what may change while there are
// rows all follow from it.
#pragma once

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
};
inline constexpr uint32_t kNumOptimizerKinds = 9;

// One flat set of hyper-parameters; Validate() refuses those that the kind does not have, so none
// is silently ignored. The rules are torch.optim's, and for FTRL those of McMahan et al. (2013),
// applied to the rows of a batch.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  float lr = 0.01f;           // a schedule may take it down to 0
  float weight_decay = 0.0f;  // L2, added to the gradient; AdamW: taken off the weights
  float momentum = 0.0f;      // SGD, RMSprop; one state float per element when not 0
  float initial_accumulator_value = 0.0f;  // Adagrad, FTRL
  float g_square_momentum = 1.0f;          // Adagrad: accumulator = accumulator * this + g^2
  float eps = 1e-10f;                      // outside the square root, as in torch; Adadelta: inside
  float beta1 = 0.9f;                      // Adam, AdamW, Adamax
  float beta2 = 0.999f;                    // Adam, AdamW, Adamax
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
};

enum class ValueRange : uint8_t {
  kPositive,     // above 0
  kNotNegative,  // 0 or above
  kDecay,        // 0 to below 1
  kShare,        // above 0, up to 1
  kFlag,         // 0 or 1
};

struct OptimizerField {
  std::string_view name;
  float OptimizerConfig::* member;
  uint32_t kinds;  // bit k: kind k has it
  ValueRange range;
  bool is_fixed;  // may not change while there are rows: their state depends on it

  bool IsOf(OptimizerKind kind) const { return (kinds >> static_cast<uint32_t>(kind) & 1) != 0; }
};

// In the order in which they are encoded.
std::span<const OptimizerField> OptimizerFields();

// "adagrad", ...: what configurations call it.
std::string_view OptimizerName(OptimizerKind kind);
std::optional<OptimizerKind> OptimizerOfName(std::string_view name);

}  // namespace persia

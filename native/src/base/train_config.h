// What a training job tells every parameter server once: how rows begin and how they are updated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace persia {

// Initial values are uniform in [lower, upper), a function of (seed, sign, element) alone.
struct Initializer {
  float lower = -0.01f;
  float upper = 0.01f;
  uint64_t seed = 0;
  bool operator==(const Initializer&) const = default;
};

enum class OptimizerKind : uint8_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };

// One flat set of hyper-parameters; Validate() refuses those that the
// kind does not have, so none is silently ignored. The rules are
// torch.optim's (SGD, Adagrad, Adam), applied to the rows of a batch.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  float lr = 0.01f;
  float weight_decay = 0.0f;               // L2, added to the gradient
  float momentum = 0.0f;                   // SGD; needs one state float per element when not 0
  float initial_accumulator_value = 0.0f;  // Adagrad
  float g_square_momentum = 1.0f;          // Adagrad: accumulator = accumulator * this + g^2
  float eps = 1e-10f;                      // Adagrad, Adam: outside the square root, as in torch
  float beta1 = 0.9f;                      // Adam
  float beta2 = 0.999f;                    // Adam
  bool operator==(const OptimizerConfig&) const = default;

  Status Validate() const;
  // Floats of optimizer state behind a row's embedding (Adam's step counter is in the row header).
  uint32_t StateFloats(uint32_t dim) const;
};

struct TrainConfig {
  Initializer initializer;
  OptimizerConfig optimizer;
  // Of giving an unseen sign a row; decided by the sign, not by chance.
  float admit_probability = 1.0f;
  // Every element is clamped to [-bound, bound] after an update; 0: off.
  float weight_bound = 10.0f;
  bool operator==(const TrainConfig&) const = default;

  Status Validate() const;
  // The wire form (docs/wire_format.md), versioned and length-checked.
  std::vector<std::byte> Encode() const;
  static StatusOr<TrainConfig> Decode(std::span<const std::byte> bytes);
};

}  // namespace persia

// How the values of a new row come about: a function of (seed, sign, element), and of the dim where
// `scaled_by_dim` says so.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace persia {

enum class InitializerKind : uint8_t { kUniform = 0, kNormal = 1 };
inline constexpr uint32_t kNumInitializerKinds = 2;

struct Initializer {
  // Uniform: in [lower, upper), or all `lower` where the two are equal: a constant.
  // Normal: restricted to [lower, upper], which may be infinite.
  float lower = -0.01f;
  float upper = 0.01f;
  uint64_t seed = 0;
  InitializerKind kind = InitializerKind::kUniform;
  float mean = 0.0f;    // normal
  float stddev = 0.0f;  // normal, above 0
  // Divides all of them by sqrt(dim): Xavier's rule for rows of any dim.
  bool scaled_by_dim = false;
  bool operator==(const Initializer&) const = default;

  Status Validate() const;
};

}  // namespace persia

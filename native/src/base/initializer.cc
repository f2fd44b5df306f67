#include "base/initializer.h"

#include <cmath>
#include <string>
#include <string_view>

namespace persia {
namespace {

Status Refuse(std::string_view field, float value, std::string_view remedy) {
  return InvalidArgument("initializer." + std::string(field) + " is " + std::to_string(value) +
                         "; give " + std::string(remedy));
}

Status CheckUniform(const Initializer& init) {
  if (!std::isfinite(init.lower)) return Refuse("lower", init.lower, "a finite value");
  if (!std::isfinite(init.upper) || init.upper < init.lower) {
    return Refuse("upper", init.upper, "a finite value not below initializer.lower");
  }
  if (!std::isfinite(init.upper - init.lower)) {
    return Refuse("upper - initializer.lower", init.upper - init.lower,
                  "bounds that are closer together");
  }
  if (init.mean != 0) return Refuse("mean", init.mean, "none: a uniform initializer has no mean");
  if (init.stddev == 0) return Status::Ok();
  return Refuse("std", init.stddev, "none: a uniform initializer has no standard deviation");
}

// Beyond so many standard deviations from the mean there is next to nothing to draw from.
constexpr float kFarthest = 4.0f;

Status CheckNormal(const Initializer& init) {
  if (!std::isfinite(init.mean)) return Refuse("mean", init.mean, "a finite value");
  if (!std::isfinite(init.stddev) || init.stddev <= 0) {
    return Refuse("std", init.stddev, "a finite value above 0");
  }
  const float reach = kFarthest * init.stddev;
  if (!(init.lower <= init.mean + reach)) {
    return Refuse("lower", init.lower, "at most the mean plus 4 standard deviations");
  }
  if (!(init.upper >= init.mean - reach)) {
    return Refuse("upper", init.upper, "at least the mean minus 4 standard deviations");
  }
  if (init.upper > init.lower) return Status::Ok();
  return Refuse("upper", init.upper, "a value above initializer.lower");
}

}  // namespace

Status Initializer::Validate() const {
  switch (kind) {
    case InitializerKind::kUniform: return CheckUniform(*this);
    case InitializerKind::kNormal: return CheckNormal(*this);
  }
  return InvalidArgument("initializer kind is " + std::to_string(static_cast<int>(kind)) +
                         "; known are 0 (uniform) and 1 (normal)");
}

}  // namespace persia

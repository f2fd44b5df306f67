#include "base/optimizer_config.h"

#include <array>
#include <cmath>
#include <iterator>
#include <string>

namespace persia {
namespace {

using Config = OptimizerConfig;
using Kind = OptimizerKind;

constexpr std::array<OptimizerField, 16> kFields = {{
    {"lr", &Config::lr, Hyper::kLr, ValueRange::kNotNegative, false},
    {"weight_decay", &Config::weight_decay, Hyper::kWeightDecay, ValueRange::kNotNegative, false},
    {"momentum", &Config::momentum, Hyper::kMomentum, ValueRange::kDecay, true},
    {"initial_accumulator_value", &Config::initial_accumulator_value,
     Hyper::kInitialAccumulatorValue, ValueRange::kNotNegative, true},
    {"g_square_momentum", &Config::g_square_momentum, Hyper::kGSquareMomentum, ValueRange::kShare,
     true},
    {"eps", &Config::eps, Hyper::kEps, ValueRange::kPositive, true},
    {"beta1", &Config::beta1, Hyper::kBeta1, ValueRange::kDecay, true},
    {"beta2", &Config::beta2, Hyper::kBeta2, ValueRange::kDecay, true},
    {"dampening", &Config::dampening, Hyper::kDampening, ValueRange::kDecay, true},
    {"nesterov", &Config::nesterov, Hyper::kNesterov, ValueRange::kFlag, true},
    {"alpha", &Config::alpha, Hyper::kAlpha, ValueRange::kDecay, true},
    {"centered", &Config::centered, Hyper::kCentered, ValueRange::kFlag, true},
    {"rho", &Config::rho, Hyper::kRho, ValueRange::kDecay, true},
    {"l1", &Config::l1, Hyper::kL1, ValueRange::kNotNegative, false},
    {"l2", &Config::l2, Hyper::kL2, ValueRange::kNotNegative, false},
    {"beta", &Config::beta, Hyper::kBeta, ValueRange::kNotNegative, false},
}};

bool IsInRange(float value, ValueRange range) {
  if (!std::isfinite(value)) return false;
  switch (range) {
    case ValueRange::kPositive: return value > 0;
    case ValueRange::kNotNegative: return value >= 0;
    case ValueRange::kDecay: return value >= 0 && value < 1;
    case ValueRange::kShare: return value > 0 && value <= 1;
    case ValueRange::kFlag: return value == 0 || value == 1;
  }
  return false;
}

std::string_view RangeText(ValueRange range) {
  switch (range) {
    case ValueRange::kPositive: return "above 0";
    case ValueRange::kNotNegative: return "of at least 0";
    case ValueRange::kDecay: return "from 0 to below 1";
    case ValueRange::kShare: return "above 0 and up to 1";
    case ValueRange::kFlag: return "of 0 or 1";
  }
  return "";
}

Status CheckField(const Config& config, const OptimizerField& field) {
  const float value = config.*field.member;
  const std::string name(field.name);
  if (field.IsOf(config.kind)) {
    if (IsInRange(value, field.range)) return Status::Ok();
    return InvalidArgument(name + " is " + std::to_string(value) + "; give a value " +
                           std::string(RangeText(field.range)));
  }
  // What the kind does not have must be left alone, or the user believes it has an effect.
  const float unset = Config().*field.member;
  if (value == unset) return Status::Ok();
  return InvalidArgument(name + " is " + std::to_string(value) + ", but " +
                         std::string(OptimizerName(config.kind)) + " has no " + name +
                         "; leave it out or choose another optimizer");
}

// What makes sense only together.
Status CheckCombinations(const Config& c) {
  if (c.nesterov != 0 && (c.momentum == 0 || c.dampening != 0)) {
    return InvalidArgument("nesterov needs a momentum above 0 and a dampening of 0");
  }
  if (c.dampening != 0 && c.momentum == 0) {
    return InvalidArgument("dampening is " + std::to_string(c.dampening) +
                           ", which only a momentum above 0 gives a meaning; leave it out");
  }
  if (c.kind == Kind::kFtrl && c.lr == 0) {
    return InvalidArgument("lr is 0; give ftrl a value above 0, by which it divides");
  }
  if (c.kind == Kind::kFtrl && c.initial_accumulator_value == 0 && c.beta == 0) {
    return InvalidArgument(
        "initial_accumulator_value and beta are both 0: ftrl needs one of them above 0, or the "
        "first step of a row divides by 0");
  }
  return Status::Ok();
}

}  // namespace

OptimizerConfig OptimizerConfig::Of(OptimizerKind kind) {
  return kOptimizers[static_cast<size_t>(kind)].defaults;
}

Status OptimizerConfig::Validate() const {
  if (static_cast<uint32_t>(kind) >= kNumOptimizerKinds) {
    return InvalidArgument("optimizer kind is " + std::to_string(static_cast<int>(kind)) +
                           "; known are 0 (sgd) to " + std::to_string(kNumOptimizerKinds - 1) +
                           " (" + std::string(std::end(kOptimizers)[-1].name) + ")");
  }
  for (const OptimizerField& field : kFields) PERSIA_RETURN_IF_ERROR(CheckField(*this, field));
  return CheckCombinations(*this);
}

bool OptimizerConfig::HasScalar() const {
  const RowScalar scalar = traits().scalar;
  return scalar == RowScalar::kIfDampened ? dampening != 0.0f : scalar != RowScalar::kNone;
}

uint32_t OptimizerConfig::StateFloats(uint32_t dim) const {
  if (traits().scalar == RowScalar::kAccumulator) return 1;
  return (traits().state_arrays + (momentum != 0.0f) + (centered != 0.0f)) * dim;
}

std::span<const OptimizerField> OptimizerFields() { return kFields; }

std::string_view OptimizerName(OptimizerKind kind) {
  const auto number = static_cast<uint32_t>(kind);
  return number < kNumOptimizerKinds ? kOptimizers[number].name : "unknown";
}

std::optional<OptimizerKind> OptimizerOfName(std::string_view name) {
  for (const OptimizerTraits& traits : kOptimizers) {
    if (name == traits.name) return traits.defaults.kind;
  }
  return std::nullopt;
}

}  // namespace persia

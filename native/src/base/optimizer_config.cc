#include "base/optimizer_config.h"

#include <array>
#include <cmath>
#include <iterator>
#include <string>

namespace persia {
namespace {

using Config = OptimizerConfig;
using Kind = OptimizerKind;

// What is fixed either sizes the state or gives what is in it its meaning. Rates, decays of weights
// and FTRL's penalties only steer the next step.
constexpr std::array<OptimizerField, 16> kFields = {{
    {"lr", &Config::lr, ValueRange::kNotNegative, false},
    {"weight_decay", &Config::weight_decay, ValueRange::kNotNegative, false},
    {"momentum", &Config::momentum, ValueRange::kDecay, true},
    {"initial_accumulator_value", &Config::initial_accumulator_value, ValueRange::kNotNegative,
     true},
    {"g_square_momentum", &Config::g_square_momentum, ValueRange::kShare, true},
    {"eps", &Config::eps, ValueRange::kPositive, true},
    {"beta1", &Config::beta1, ValueRange::kDecay, true},
    {"beta2", &Config::beta2, ValueRange::kDecay, true},
    {"dampening", &Config::dampening, ValueRange::kDecay, true},
    {"nesterov", &Config::nesterov, ValueRange::kFlag, true},
    {"alpha", &Config::alpha, ValueRange::kDecay, true},
    {"centered", &Config::centered, ValueRange::kFlag, true},
    {"rho", &Config::rho, ValueRange::kDecay, true},
    {"l1", &Config::l1, ValueRange::kNotNegative, false},
    {"l2", &Config::l2, ValueRange::kNotNegative, false},
    {"beta", &Config::beta, ValueRange::kNotNegative, false},
}};

// One row for each range, so that what is checked and what is said cannot differ.
struct RangeRule {
  bool (*holds)(float);
  std::string_view text;  // for messages
};

// In the order of ValueRange.
constexpr RangeRule kRanges[] = {
    {[](float x) { return x > 0; }, "above 0"},
    {[](float x) { return x >= 0; }, "of at least 0"},
    {[](float x) { return x >= 0 && x < 1; }, "from 0 to below 1"},
    {[](float x) { return x > 0 && x <= 1; }, "above 0 and up to 1"},
    {[](float x) { return x == 0 || x == 1; }, "of 0 or 1"},
};

Status CheckField(const Config& config, const OptimizerField& field) {
  const float value = config.*field.member;
  const std::string name(field.name);
  if (field.IsOf(config.kind)) {
    const RangeRule& range = kRanges[static_cast<size_t>(field.range)];
    if (std::isfinite(value) && range.holds(value)) return Status::Ok();
    return InvalidArgument(name, " is ", value, "; give a value ", range.text);
  }
  // What the kind does not have must be left alone, or the user believes it has an effect.
  // The struct's default, not the kind's: what a config leaves out has it.
  const float unset = Config().*field.member;
  if (value == unset) return Status::Ok();
  return InvalidArgument(name, " is ", value, ", but ", OptimizerName(config.kind), " has no ",
                         name, "; leave it out or choose another optimizer");
}

// What makes sense only together.
Status CheckCombinations(const Config& c) {
  if (c.nesterov != 0 && (c.momentum == 0 || c.dampening != 0)) {
    return InvalidArgument("nesterov needs a momentum above 0 and a dampening of 0");
  }
  if (c.dampening != 0 && c.momentum == 0) {
    return InvalidArgument("dampening is ", c.dampening,
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
    return InvalidArgument("optimizer kind is ", static_cast<int>(kind), "; known are 0 (sgd) to ",
                           kNumOptimizerKinds - 1, " (", std::end(kOptimizers)[-1].name, ")");
  }
  for (const OptimizerField& field : kFields) PERSIA_RETURN_IF_ERROR(CheckField(*this, field));
  // Last: a field out of its range is the plainer message.
  return CheckCombinations(*this);
}

bool OptimizerConfig::HasScalar() const {
  const RowScalar scalar = traits().scalar;
  return scalar == RowScalar::kIfDampened ? dampening != 0.0f : scalar != RowScalar::kNone;
}

// Those of row-wise Adagrad are its scalar, which is stored beside the row and not behind it.
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

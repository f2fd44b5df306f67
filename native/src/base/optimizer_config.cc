#include "base/optimizer_config.h"

#include <array>
#include <cmath>
#include <string>

namespace persia {
namespace {

using Config = OptimizerConfig;
using Kind = OptimizerKind;

template <typename... Kinds>
constexpr uint32_t Bits(Kinds... kinds) {
  return ((1u << static_cast<uint32_t>(kinds)) | ...);
}

constexpr uint32_t kAll = (1u << kNumOptimizerKinds) - 1;
constexpr uint32_t kAdagrads = Bits(Kind::kAdagrad, Kind::kRowwiseAdagrad);
constexpr uint32_t kAdams = Bits(Kind::kAdam, Kind::kAdamW, Kind::kAdamax);
constexpr uint32_t kSgd = Bits(Kind::kSgd), kRmsprop = Bits(Kind::kRmsprop);
constexpr uint32_t kAdadelta = Bits(Kind::kAdadelta), kFtrl = Bits(Kind::kFtrl);

constexpr std::array<OptimizerField, 16> kFields = {{
    {"lr", &Config::lr, kAll, ValueRange::kNotNegative, false},
    {"weight_decay", &Config::weight_decay, kAll & ~kFtrl, ValueRange::kNotNegative, false},
    {"momentum", &Config::momentum, kSgd | kRmsprop, ValueRange::kDecay, true},
    {"initial_accumulator_value", &Config::initial_accumulator_value, kAdagrads | kFtrl,
     ValueRange::kNotNegative, true},
    {"g_square_momentum", &Config::g_square_momentum, kAdagrads, ValueRange::kShare, true},
    {"eps", &Config::eps, kAll & ~kSgd & ~kFtrl, ValueRange::kPositive, true},
    {"beta1", &Config::beta1, kAdams, ValueRange::kDecay, true},
    {"beta2", &Config::beta2, kAdams, ValueRange::kDecay, true},
    {"dampening", &Config::dampening, kSgd, ValueRange::kDecay, true},
    {"nesterov", &Config::nesterov, kSgd, ValueRange::kFlag, true},
    {"alpha", &Config::alpha, kRmsprop, ValueRange::kDecay, true},
    {"centered", &Config::centered, kRmsprop, ValueRange::kFlag, true},
    {"rho", &Config::rho, kAdadelta, ValueRange::kDecay, true},
    {"l1", &Config::l1, kFtrl, ValueRange::kNotNegative, false},
    {"l2", &Config::l2, kFtrl, ValueRange::kNotNegative, false},
    {"beta", &Config::beta, kFtrl, ValueRange::kNotNegative, false},
}};

constexpr std::array<std::string_view, kNumOptimizerKinds> kNames = {
    "sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "rmsprop", "adadelta", "adamax", "ftrl"};

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
  OptimizerConfig config{.kind = kind};
  switch (kind) {
    case Kind::kSgd:
    case Kind::kAdagrad:
    case Kind::kRowwiseAdagrad: break;
    case Kind::kAdam:
    case Kind::kAdamW:
    case Kind::kRmsprop:
    case Kind::kAdamax: config.eps = 1e-8f; break;
    case Kind::kAdadelta: config.eps = 1e-6f; break;
    case Kind::kFtrl: config.initial_accumulator_value = 0.1f; break;
  }
  if (kind == Kind::kAdagrad || kind == Kind::kRowwiseAdagrad) {
    config.initial_accumulator_value = 0.01f;
  }
  if (kind == Kind::kAdamW) config.weight_decay = 0.01f;
  return config;
}

Status OptimizerConfig::Validate() const {
  if (static_cast<uint32_t>(kind) >= kNumOptimizerKinds) {
    return InvalidArgument("optimizer kind is " + std::to_string(static_cast<int>(kind)) +
                           "; known are 0 (sgd) to " + std::to_string(kNumOptimizerKinds - 1) +
                           " (" + std::string(kNames.back()) + ")");
  }
  for (const OptimizerField& field : kFields) PERSIA_RETURN_IF_ERROR(CheckField(*this, field));
  return CheckCombinations(*this);
}

bool OptimizerConfig::HasScalar() const {
  switch (kind) {
    case Kind::kRowwiseAdagrad:
    case Kind::kAdam:
    case Kind::kAdamW:
    case Kind::kAdamax: return true;
    case Kind::kSgd: return dampening != 0.0f;  // tells a row's first step
    default: return false;
  }
}

uint32_t OptimizerConfig::StateFloats(uint32_t dim) const {
  const uint32_t momentum_floats = momentum == 0.0f ? 0 : dim;
  switch (kind) {
    case Kind::kSgd: return momentum_floats;
    case Kind::kAdagrad: return dim;
    case Kind::kRowwiseAdagrad: return 1;
    case Kind::kRmsprop: return dim + momentum_floats + (centered == 0.0f ? 0 : dim);
    case Kind::kAdam:
    case Kind::kAdamW:
    case Kind::kAdadelta:
    case Kind::kAdamax:
    case Kind::kFtrl: return 2 * dim;
  }
  return 0;
}

std::span<const OptimizerField> OptimizerFields() { return kFields; }

std::string_view OptimizerName(OptimizerKind kind) {
  const auto number = static_cast<uint32_t>(kind);
  return number < kNames.size() ? kNames[number] : "unknown";
}

std::optional<OptimizerKind> OptimizerOfName(std::string_view name) {
  for (uint32_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<OptimizerKind>(i);
  }
  return std::nullopt;
}

}  // namespace persia

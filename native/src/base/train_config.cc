#include "base/train_config.h"

#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace persia {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kEncodedBytes = 64;

std::string_view KindName(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kSgd: return "SGD";
    case OptimizerKind::kAdagrad: return "Adagrad";
    case OptimizerKind::kRowwiseAdagrad: return "row-wise Adagrad";
    case OptimizerKind::kAdam: return "Adam";
  }
  return "unknown";
}

Status CheckRange(std::string_view field, float value, bool in_range, std::string_view range) {
  if (std::isfinite(value) && in_range) return Status::Ok();
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + "; give a value " +
                         std::string(range));
}

// A hyper-parameter that `kind` does not have must be
// left alone, or the user believes it has an effect.
Status CheckUnused(OptimizerKind kind, std::string_view field, float value, float unset) {
  if (value == unset) return Status::Ok();
  const std::string name(field);
  return InvalidArgument(name + " is " + std::to_string(value) + ", but " +
                         std::string(KindName(kind)) + " has no " + name + "; leave it at " +
                         std::to_string(unset) + " or choose another optimizer");
}

Status CheckAdagrad(const OptimizerConfig& c) {
  PERSIA_RETURN_IF_ERROR(CheckRange("initial_accumulator_value", c.initial_accumulator_value,
                                    c.initial_accumulator_value >= 0, "of at least 0"));
  return CheckRange("g_square_momentum", c.g_square_momentum,
                    c.g_square_momentum > 0 && c.g_square_momentum <= 1, "above 0 and up to 1");
}

Status CheckAdam(const OptimizerConfig& c) {
  PERSIA_RETURN_IF_ERROR(
      CheckRange("beta1", c.beta1, c.beta1 >= 0 && c.beta1 < 1, "from 0 to below 1"));
  return CheckRange("beta2", c.beta2, c.beta2 >= 0 && c.beta2 < 1, "from 0 to below 1");
}

// Refuses what the optimizer's kind does not have; checks what it has besides lr and weight_decay.
Status CheckByKind(const OptimizerConfig& c) {
  const OptimizerConfig unset;
  const bool sgd = c.kind == OptimizerKind::kSgd;
  const bool adam = c.kind == OptimizerKind::kAdam;
  const bool adagrad = !sgd && !adam;
  auto unused = [&c](std::string_view field, float value, float default_value) {
    return CheckUnused(c.kind, field, value, default_value);
  };
  if (!sgd) PERSIA_RETURN_IF_ERROR(unused("momentum", c.momentum, unset.momentum));
  if (!adagrad) {
    PERSIA_RETURN_IF_ERROR(unused("initial_accumulator_value", c.initial_accumulator_value,
                                  unset.initial_accumulator_value));
    PERSIA_RETURN_IF_ERROR(
        unused("g_square_momentum", c.g_square_momentum, unset.g_square_momentum));
  }
  if (!adam) {
    PERSIA_RETURN_IF_ERROR(unused("beta1", c.beta1, unset.beta1));
    PERSIA_RETURN_IF_ERROR(unused("beta2", c.beta2, unset.beta2));
  }
  if (sgd) {
    PERSIA_RETURN_IF_ERROR(unused("eps", c.eps, unset.eps));
    return CheckRange("momentum", c.momentum, c.momentum >= 0 && c.momentum < 1,
                      "from 0 to below 1");
  }
  PERSIA_RETURN_IF_ERROR(CheckRange("eps", c.eps, c.eps > 0, "above 0"));
  return adam ? CheckAdam(c) : CheckAdagrad(c);
}

Status CheckInitializer(const Initializer& init) {
  PERSIA_RETURN_IF_ERROR(CheckRange("initializer.lower", init.lower, true, "that is finite"));
  PERSIA_RETURN_IF_ERROR(CheckRange("initializer.upper", init.upper, init.upper >= init.lower,
                                    "that is finite and not below initializer.lower"));
  return CheckRange("initializer.upper - initializer.lower", init.upper - init.lower, true,
                    "that is finite: bring the two bounds closer together");
}

}  // namespace

Status OptimizerConfig::Validate() const {
  if (kind > OptimizerKind::kAdam) {
    return InvalidArgument("optimizer kind is " + std::to_string(static_cast<int>(kind)) +
                           "; give 0 (SGD), 1 (Adagrad), 2 (row-wise Adagrad) or 3 (Adam)");
  }
  PERSIA_RETURN_IF_ERROR(CheckRange("lr", lr, lr > 0, "above 0"));
  PERSIA_RETURN_IF_ERROR(
      CheckRange("weight_decay", weight_decay, weight_decay >= 0, "of at least 0"));
  return CheckByKind(*this);
}

uint32_t OptimizerConfig::StateFloats(uint32_t dim) const {
  switch (kind) {
    case OptimizerKind::kSgd: return momentum == 0.0f ? 0 : dim;
    case OptimizerKind::kAdagrad: return dim;
    case OptimizerKind::kRowwiseAdagrad: return 1;
    case OptimizerKind::kAdam: return 2 * dim;
  }
  return 0;
}

Status TrainConfig::Validate() const {
  PERSIA_RETURN_IF_ERROR(optimizer.Validate());
  PERSIA_RETURN_IF_ERROR(CheckInitializer(initializer));
  PERSIA_RETURN_IF_ERROR(CheckRange("admit_probability", admit_probability,
                                    admit_probability >= 0 && admit_probability <= 1,
                                    "from 0 to 1"));
  return CheckRange("weight_bound", weight_bound, weight_bound >= 0, "above 0, or 0 for no bound");
}

std::vector<std::byte> TrainConfig::Encode() const {
  ByteWriter writer;
  writer.Put(kVersion);
  writer.Put(static_cast<uint32_t>(optimizer.kind));
  for (float value :
       {optimizer.lr, optimizer.weight_decay, optimizer.momentum,
        optimizer.initial_accumulator_value, optimizer.g_square_momentum, optimizer.eps,
        optimizer.beta1, optimizer.beta2, initializer.lower, initializer.upper}) {
    writer.Put(value);
  }
  writer.Put(initializer.seed);
  writer.Put(admit_probability);
  writer.Put(weight_bound);
  return writer.Release();
}

StatusOr<TrainConfig> TrainConfig::Decode(std::span<const std::byte> bytes) {
  if (bytes.size() != kEncodedBytes) {
    return Corruption("train config is " + std::to_string(bytes.size()) + " bytes; expected " +
                      std::to_string(kEncodedBytes) + ": use the same persia version everywhere");
  }
  ByteReader reader(bytes);
  if (const auto version = reader.Get<uint32_t>(); version != kVersion) {
    return Corruption("train config version is " + std::to_string(version) + "; expected " +
                      std::to_string(kVersion) + ": use the same persia version everywhere");
  }
  const auto kind = reader.Get<uint32_t>();
  if (kind > static_cast<uint32_t>(OptimizerKind::kAdam)) {
    return Corruption("train config has optimizer kind " + std::to_string(kind) +
                      "; known are 0 to 3: use the same persia version everywhere");
  }
  TrainConfig config;
  OptimizerConfig& optimizer = config.optimizer;
  optimizer.kind = static_cast<OptimizerKind>(kind);
  for (float* value :
       {&optimizer.lr, &optimizer.weight_decay, &optimizer.momentum,
        &optimizer.initial_accumulator_value, &optimizer.g_square_momentum, &optimizer.eps,
        &optimizer.beta1, &optimizer.beta2, &config.initializer.lower, &config.initializer.upper}) {
    *value = reader.Get<float>();
  }
  config.initializer.seed = reader.Get<uint64_t>();
  config.admit_probability = reader.Get<float>();
  config.weight_bound = reader.Get<float>();
  PERSIA_RETURN_IF_ERROR(config.Validate());
  return config;
}

}  // namespace persia

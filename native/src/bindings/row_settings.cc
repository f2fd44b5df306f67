#include "bindings/row_settings.h"

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "bindings/errors.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

[[noreturn]] void Refuse(const auto&... parts) {
  RaiseIfError(InvalidArgument(parts...));
  throw py::error_already_set();  // not reached
}

// Accepts what Python calls a number, and nothing that merely converts to one: a string in YAML is
// a mistake.
float Number(const std::string& name, py::handle value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>() ? 1.0f : 0.0f;
  if (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr())) {
    Refuse(name, "=", py::repr(value).cast<std::string>(), " is no number");
  }
  const auto number = static_cast<float>(PyFloat_AsDouble(value.ptr()));
  if (PyErr_Occurred() == nullptr) return number;
  PyErr_Clear();  // an int beyond all floats
  return std::numeric_limits<float>::infinity();
}

// The names of a table's entries, for messages.
// Entries whose name is empty are left out, which is how a caller selects.
template <typename Entries, typename Name>
std::string Listed(const Entries& entries, Name name) {
  std::string list;
  for (const auto& entry : entries) {
    const std::string_view text = name(entry);
    if (!text.empty()) list += (list.empty() ? "" : ", ") + std::string(text);
  }
  return list;
}

std::string OptimizerNames() {
  std::string names;
  for (uint32_t kind = 0; kind < kNumOptimizerKinds; ++kind) {
    names += (kind == 0 ? "" : ", ") + std::string(OptimizerName(static_cast<OptimizerKind>(kind)));
  }
  return names;
}

// Also sets what the kind does not have: Validate() then says so with the value that was given.
void SetHyperParameter(const std::string& name, py::handle value, OptimizerConfig* config) {
  for (const OptimizerField& field : OptimizerFields()) {
    if (field.name == name) {
      config->*field.member = Number(name, value);
      return;
    }
  }
  Refuse(name, " is no hyper-parameter of ", OptimizerName(config->kind), ", which has ",
         Listed(OptimizerFields(), [config](const OptimizerField& field) {
           return field.IsOf(config->kind) ? field.name : std::string_view();
         }));
}

std::string TakeName(const char* what, const py::dict& settings) {
  if (!settings.contains("name") || !py::isinstance<py::str>(settings["name"])) {
    Refuse(what, " has no name: give one, such as {name: ",
           what == std::string_view("optimizer") ? "adagrad" : "normal", "}");
  }
  return settings["name"].cast<std::string>();
}

// The name has been taken; what is left are the arguments.
py::dict WithoutName(const py::dict& settings) {
  py::dict rest;
  for (const auto& [key, value] : settings) {
    if (key.cast<std::string>() != "name") rest[key] = value;
  }
  return rest;
}

// The kinds of initial values that have names of their own.
constexpr std::string_view kInitializerNames =
    "uniform, normal, truncated_normal, constant, zeros, ones, xavier_uniform, xavier_normal";

// An argument of an initializer.
struct Setting {
  std::string_view name;
  std::optional<float> fallback;  // none: it must be given
};

// Takes the settings that the kind has, in their order, and refuses all others.
template <size_t kCount>
std::array<float, kCount> TakeNumbers(const std::string& kind, const py::dict& settings,
                                      const std::array<Setting, kCount>& known) {
  std::array<float, kCount> numbers;
  size_t num_taken = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const std::string name(known[i].name);
    if (settings.contains(name.c_str())) {
      // By its full name: the message must tell it from a setting of the optimizer.
      numbers[i] = Number("initializer." + name, settings[name.c_str()]);
      ++num_taken;
    } else if (known[i].fallback.has_value()) {
      numbers[i] = *known[i].fallback;
    } else {
      Refuse("initializer ", kind, " has no ", name, ": give it");
    }
  }
  if (num_taken == settings.size()) return numbers;
  Refuse("initializer ", kind, " has a setting that is unknown; known are: ",
         Listed(known, [](const Setting& setting) { return setting.name; }));
}

Initializer Uniform(float lower, float upper, bool scaled_by_dim = false) {
  return {.lower = lower, .upper = upper, .scaled_by_dim = scaled_by_dim};
}

Initializer Normal(float mean, float stddev, float lower, float upper, bool scaled_by_dim = false) {
  return {.lower = lower,
          .upper = upper,
          .kind = InitializerKind::kNormal,
          .mean = mean,
          .stddev = stddev,
          .scaled_by_dim = scaled_by_dim};
}

// Each name is a case of the two kinds that rows are drawn by (base/train_config.h).
Initializer OfName(const std::string& name, const py::dict& rest) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (name == "uniform") {
    const auto [lower, upper] = TakeNumbers<2>(name, rest, {{{"lower", -0.01f}, {"upper", 0.01f}}});
    return Uniform(lower, upper);
  }
  if (name == "normal") {
    const auto [mean, stddev] = TakeNumbers<2>(name, rest, {{{"mean", 0.0f}, {"std", 0.01f}}});
    return Normal(mean, stddev, -kInfinity, kInfinity);
  }
  if (name == "truncated_normal") {
    const auto [mean, stddev, lower, upper] = TakeNumbers<4>(
        name, rest,
        {{{"mean", 0.0f}, {"std", 0.01f}, {"lower", std::nanf("")}, {"upper", std::nanf("")}}});
    return Normal(mean, stddev, std::isnan(lower) ? mean - 2 * stddev : lower,
                  std::isnan(upper) ? mean + 2 * stddev : upper);
  }
  if (name == "constant") {
    const auto [value] = TakeNumbers<1>(name, rest, {{{"value", std::nullopt}}});
    return Uniform(value, value);
  }
  if (name == "zeros" || name == "ones") {
    TakeNumbers<0>(name, rest, {});
    const float value = name == "zeros" ? 0.0f : 1.0f;
    return Uniform(value, value);
  }
  if (name == "xavier_uniform") {
    const auto [gain] = TakeNumbers<1>(name, rest, {{{"gain", 1.0f}}});
    // A uniform draw from [-a, a) has variance a^2 / 3; dividing by sqrt(dim) makes it gain^2 /
    // dim.
    const auto bound = static_cast<float>(gain * std::sqrt(3.0));
    return Uniform(-bound, bound, /*scaled_by_dim=*/true);
  }
  if (name == "xavier_normal") {
    const auto [gain] = TakeNumbers<1>(name, rest, {{{"gain", 1.0f}}});
    return Normal(0.0f, gain, -kInfinity, kInfinity, /*scaled_by_dim=*/true);
  }
  Refuse("initializer '", name, "' is not one of ", kInitializerNames);
}

}  // namespace

OptimizerConfig MakeOptimizer(const std::string& name, const py::dict& settings) {
  const auto kind = OptimizerOfName(name);
  if (!kind.has_value()) Refuse("optimizer: '", name, "' is not one of ", OptimizerNames());
  OptimizerConfig config = OptimizerConfig::Of(*kind);
  if (!settings.contains("lr")) Refuse("optimizer ", name, " has no lr: give a learning rate");
  for (const auto& [key, value] : settings) {
    SetHyperParameter(key.cast<std::string>(), value, &config);
  }
  RaiseIfError(config.Validate());
  return config;
}

Initializer MakeInitializer(const py::dict& settings) {
  const Initializer init = OfName(TakeName("initializer", settings), WithoutName(settings));
  RaiseIfError(init.Validate());
  return init;
}

SlotRowConfig MakeSlotRowConfig(const py::dict& settings) {
  SlotRowConfig config;
  for (const auto& [key, value] : settings) {
    const auto name = key.cast<std::string>();
    if (name == "optimizer") {
      const auto optimizer = value.cast<py::dict>();
      config.optimizer = MakeOptimizer(TakeName("optimizer", optimizer), WithoutName(optimizer));
    } else if (name == "initializer") {
      config.initializer = MakeInitializer(value.cast<py::dict>());
    } else if (name == "admit_probability") {
      config.admit_probability = Number(name, value);
    } else if (name == "admit_after") {
      config.admit_after = value.cast<uint32_t>();
    } else if (name == "weight_bound") {
      config.weight_bound = Number(name, value);
    } else if (name == "time_to_live_sec") {
      config.time_to_live_sec = Number(name, value);
    } else if (name == "min_norm") {
      config.min_norm = Number(name, value);
    } else if (name == "capacity") {
      config.capacity = value.cast<uint64_t>();
    } else {
      Refuse("'", name, "' is no setting of a slot's rows");
    }
  }
  // Ranges are checked where the numbers are put in place of a job's defaults.
  RaiseIfError(config.Over(RowConfig(), 1.0f).Validate());
  return config;
}

}  // namespace persia::bindings

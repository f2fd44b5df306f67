#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "base/train_config.h"
#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "bindings/row_settings.h"
#include "worker/slot_config.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using worker::SlotConfig;

// `lower` and `upper` are the published way to give the initial values; an `initializer` takes
// precedence. All is checked here, so that a script hears of a mistake before servers do.
TrainConfig MakeTrainConfig(const std::string& optimizer, float lower, float upper,
                            const std::optional<py::dict>& initializer, uint64_t seed,
                            float admit_probability, uint32_t admit_after, float weight_bound,
                            float time_to_live_sec, float min_norm, float lr_factor,
                            const py::kwargs& hyper_parameters) {
  TrainConfig config;
  config.optimizer = MakeOptimizer(optimizer, hyper_parameters);
  config.initializer = {.lower = lower, .upper = upper};
  if (initializer.has_value()) config.initializer = MakeInitializer(*initializer);
  config.initializer.seed = seed;
  config.admit_probability = admit_probability;
  config.admit_after = admit_after;
  config.weight_bound = weight_bound;
  config.time_to_live_sec = time_to_live_sec;
  config.min_norm = min_norm;
  config.lr_factor = lr_factor;
  // The config is passed on as it is: a TrainConfig in Python is a valid one.
  RaiseIfError(config.Validate());
  return config;
}

// For manifests of checkpoints, which keep the config as the wire has it.
py::bytes Encode(const TrainConfig& self) {
  const auto encoded = self.Encode();
  return {reinterpret_cast<const char*>(encoded.data()), encoded.size()};
}

TrainConfig DecodeTrainConfig(const py::buffer& encoded) {
  const BytesArgument bytes(encoded, "encoded");
  return ValueOrRaise(TrainConfig::Decode(bytes.bytes()));
}

}  // namespace

void BindSlotConfig(py::module_& module) {
  // The defaults are written once, in the struct: the stub test compares them with _core.pyi.
  const SlotConfig defaults;
  // A slot is judged together with the others, when a worker is made of them.
  py::class_<SlotConfig>(module, "SlotConfig")
      .def(
          py::init([](std::string name, uint32_t dim, bool embedding_summation, bool sqrt_scaling,
                      bool mean_scaling, uint32_t sample_fixed_size, uint32_t hash_stack_rounds,
                      uint64_t hash_stack_size, uint32_t mode, uint64_t index_prefix,
                      uint32_t group, uint64_t num_array_ids, const std::optional<py::dict>& rows) {
            return SlotConfig{.name = std::move(name),
                              .dim = dim,
                              .embedding_summation = embedding_summation,
                              .sqrt_scaling = sqrt_scaling,
                              .mean_scaling = mean_scaling,
                              .sample_fixed_size = sample_fixed_size,
                              .hash_stack_rounds = hash_stack_rounds,
                              .hash_stack_size = hash_stack_size,
                              .mode = mode,
                              .index_prefix = index_prefix,
                              .group = group,
                              .num_array_ids = num_array_ids,
                              .rows = rows ? MakeSlotRowConfig(*rows) : SlotRowConfig()};
          }),
          // By keyword alone: a call with thirteen values in a row could not be read.
          py::kw_only(), py::arg("name"), py::arg("dim"),
          py::arg("embedding_summation") = defaults.embedding_summation,
          py::arg("sqrt_scaling") = defaults.sqrt_scaling,
          py::arg("mean_scaling") = defaults.mean_scaling,
          py::arg("sample_fixed_size") = defaults.sample_fixed_size,
          py::arg("hash_stack_rounds") = defaults.hash_stack_rounds,
          py::arg("hash_stack_size") = defaults.hash_stack_size, py::arg("mode") = defaults.mode,
          py::arg("index_prefix") = defaults.index_prefix, py::arg("group") = defaults.group,
          py::arg("num_array_ids") = defaults.num_array_ids, py::arg("rows") = py::none())
      .def_readwrite("name", &SlotConfig::name)
      .def_readwrite("dim", &SlotConfig::dim);
}

void BindTrainConfig(py::module_& module) {
  py::class_<TrainConfig>(module, "TrainConfig")
      .def(py::init(&MakeTrainConfig), py::kw_only(), py::arg("optimizer"),
           py::arg("lower") = -0.01, py::arg("upper") = 0.01, py::arg("initializer") = py::none(),
           py::arg("seed") = 0, py::arg("admit_probability") = 1.0, py::arg("admit_after") = 1,
           py::arg("weight_bound") = 10.0, py::arg("time_to_live_sec") = 0.0,
           py::arg("min_norm") = 0.0, py::arg("lr_factor") = 1.0)
      .def("encode", &Encode)
      .def_static("decode", &DecodeTrainConfig, py::arg("encoded"));
}

}  // namespace persia::bindings

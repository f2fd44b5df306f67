#include "base/train_config.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "bindings/row_settings.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

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
  RaiseIfError(config.Validate());
  return config;
}

py::bytes Encode(const TrainConfig& self) {
  const auto encoded = self.Encode();
  return {reinterpret_cast<const char*>(encoded.data()), encoded.size()};
}

TrainConfig Decode(const py::buffer& encoded) {
  const BytesArgument bytes(encoded, "encoded");
  return ValueOrRaise(TrainConfig::Decode(bytes.bytes()));
}

}  // namespace

void BindTrainConfig(py::module_& module) {
  const TrainConfig defaults;
  py::class_<TrainConfig>(module, "TrainConfig")
      .def(py::init(&MakeTrainConfig), py::kw_only(), py::arg("optimizer"),
           py::arg("lower") = -0.01, py::arg("upper") = 0.01, py::arg("initializer") = py::none(),
           py::arg("seed") = 0, py::arg("admit_probability") = 1.0, py::arg("admit_after") = 1,
           py::arg("weight_bound") = 10.0, py::arg("time_to_live_sec") = 0.0,
           py::arg("min_norm") = 0.0, py::arg("lr_factor") = 1.0)
      .def("encode", &Encode)
      .def_static("decode", &Decode, py::arg("encoded"));
}

}  // namespace persia::bindings

#include "base/train_config.h"

#include <pybind11/pybind11.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/errors.h"
#include "bindings/module.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

OptimizerKind ParseOptimizerKind(const std::string& name) {
  constexpr std::array<std::pair<std::string_view, OptimizerKind>, 4> kKinds = {{
      {"sgd", OptimizerKind::kSgd},
      {"adagrad", OptimizerKind::kAdagrad},
      {"rowwise_adagrad", OptimizerKind::kRowwiseAdagrad},
      {"adam", OptimizerKind::kAdam},
  }};
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  RaiseIfError(InvalidArgument("optimizer: '" + name +
                               "' is not one of sgd, adagrad, rowwise_adagrad, adam"));
  return OptimizerKind::kSgd;  // not reached: the line above raised
}

TrainConfig MakeTrainConfig(const std::string& optimizer, float lr, float weight_decay,
                            float momentum, float initial_accumulator_value,
                            float g_square_momentum, float eps, float beta1, float beta2,
                            float lower, float upper, uint64_t seed, float admit_probability,
                            float weight_bound) {
  const TrainConfig config{
      .initializer = {.lower = lower, .upper = upper, .seed = seed},
      .optimizer = {.kind = ParseOptimizerKind(optimizer),
                    .lr = lr,
                    .weight_decay = weight_decay,
                    .momentum = momentum,
                    .initial_accumulator_value = initial_accumulator_value,
                    .g_square_momentum = g_square_momentum,
                    .eps = eps,
                    .beta1 = beta1,
                    .beta2 = beta2},
      .admit_probability = admit_probability,
      .weight_bound = weight_bound,
  };
  RaiseIfError(config.Validate());
  return config;
}

}  // namespace

void BindTrainConfig(py::module_& module) {
  py::class_<TrainConfig>(module, "TrainConfig")
      .def(py::init(&MakeTrainConfig), py::kw_only(), py::arg("optimizer"), py::arg("lr"),
           py::arg("weight_decay") = 0.0, py::arg("momentum") = 0.0,
           py::arg("initial_accumulator_value") = 0.0, py::arg("g_square_momentum") = 1.0,
           py::arg("eps") = 1e-10, py::arg("beta1") = 0.9, py::arg("beta2") = 0.999,
           py::arg("lower") = -0.01, py::arg("upper") = 0.01, py::arg("seed") = 0,
           py::arg("admit_probability") = 1.0, py::arg("weight_bound") = 10.0);
}

}  // namespace persia::bindings

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/module.h"
#include "bindings/row_settings.h"
#include "worker/embedding_worker.h"

namespace persia::bindings {

namespace py = pybind11;
using worker::SlotConfig;

void BindSlotConfig(py::module_& module) {
  // The defaults are written once, in the struct: the stub test compares them with _core.pyi.
  const SlotConfig defaults;
  // A slot is judged together with the others, when a worker is made of them.
  py::class_<SlotConfig>(module, "SlotConfig")
      .def(py::init([](std::string name, uint32_t dim, bool embedding_summation, bool sqrt_scaling,
                       bool mean_scaling, uint32_t sample_fixed_size, uint32_t hash_stack_rounds,
                       uint64_t hash_stack_size, uint32_t mode, uint64_t index_prefix,
                       uint32_t group, const std::optional<py::dict>& rows) {
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
                               .rows = rows ? MakeSlotRowConfig(*rows) : SlotRowConfig()};
           }),
           py::kw_only(), py::arg("name"), py::arg("dim"),
           py::arg("embedding_summation") = defaults.embedding_summation,
           py::arg("sqrt_scaling") = defaults.sqrt_scaling,
           py::arg("mean_scaling") = defaults.mean_scaling,
           py::arg("sample_fixed_size") = defaults.sample_fixed_size,
           py::arg("hash_stack_rounds") = defaults.hash_stack_rounds,
           py::arg("hash_stack_size") = defaults.hash_stack_size, py::arg("mode") = defaults.mode,
           py::arg("index_prefix") = defaults.index_prefix, py::arg("group") = defaults.group,
           py::arg("rows") = py::none())
      .def_readwrite("name", &SlotConfig::name)
      .def_readwrite("dim", &SlotConfig::dim);
}

}  // namespace persia::bindings

#include "server/parameter_server.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bindings/errors.h"
#include "bindings/metrics.h"
#include "bindings/module.h"
#include "bindings/store.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using server::ParameterServer;

// With a tier this recovers the rows of its file, which may take minutes: the GIL is free
// meanwhile.
std::unique_ptr<ParameterServer> MakeServer(uint32_t replica_index, uint32_t replica_size,
                                            uint64_t capacity, uint32_t num_internal_shards,
                                            uint32_t num_handler_threads, bool read_only,
                                            const std::optional<store::TierOptions>& tier,
                                            const std::string& row_dtype) {
  const ParameterServer::Options options{
      .replica_index = replica_index,
      .replica_size = replica_size,
      .store = {.capacity = capacity,
                .num_internal_shards = num_internal_shards,
                .row_dtype = ValueOrRaise(store::RowDtypeOf(row_dtype))},
      .tier = tier,
      .rpc = {.num_handler_threads = num_handler_threads},
      .read_only = read_only};
  return ValueOrRaise(WithoutGil([&] { return ParameterServer::Create(options); }));
}

}  // namespace

void BindParameterServer(py::module_& module) {
  py::class_<ParameterServer> role(module, "ParameterServer",
                                   py::release_gil_before_calling_cpp_dtor());
  role.def(py::init(&MakeServer), py::kw_only(), py::arg("replica_index"), py::arg("replica_size"),
           py::arg("capacity"), py::arg("num_internal_shards"), py::arg("num_handler_threads") = 2,
           py::arg("read_only") = false, py::arg("tier") = py::none(),
           py::arg("row_dtype") = "float32")
      .def("start", Blocking(&ParameterServer::Start), py::arg("host"), py::arg("port"))
      .def("mark_loaded", &ParameterServer::MarkLoaded)
      .def("stop", Blocking(&ParameterServer::Stop), py::arg("timeout_s") = 10.0)
      .def_property_readonly("incarnation", &ParameterServer::incarnation)
      .def("durations", [](ParameterServer& self) { return DurationsToDict(self.durations()); });
  DefineMetrics(role, [](ParameterServer& self) { return self.metrics(); });
  // A dump names each file by the server's place, so the store is bound together with it.
  DefineStore(role, [](ParameterServer& self) {
    const ParameterServer::Options& options = self.options();
    return BoundStore{self.embedding_store(), {options.replica_index, options.replica_size}};
  });
}

}  // namespace persia::bindings

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

// The parameter server role. The engine takes its address when it is made, Python gives it at
// start: bad options are refused by the constructor all the same, for it makes an engine too (an
// empty store costs nothing) and drops it. A tier's pool is opened at the start alone.
class ServerRole {
 public:
  static StatusOr<std::unique_ptr<ServerRole>> Create(const ParameterServer::Options& options) {
    ParameterServer::Options in_memory = options;
    in_memory.tier.reset();
    PERSIA_RETURN_IF_ERROR(ParameterServer::Create(in_memory).status());
    return std::unique_ptr<ServerRole>(new ServerRole(options));
  }

  StatusOr<uint16_t> Start(const std::string& host, uint16_t port) {
    const std::lock_guard lock(mutex_);
    if (engine_ != nullptr) return FailedPrecondition("the parameter server was started already");
    options_.rpc.host = host;
    options_.rpc.port = port;
    auto engine = ParameterServer::Create(options_);
    if (!engine.ok()) return engine.status();
    auto bound = engine.value()->Start();
    if (bound.ok()) engine_ = std::move(engine).value();
    return bound;
  }

  // kFailedPrecondition before Start(). What it points to lives as long as the role.
  StatusOr<ParameterServer*> engine() {
    const std::lock_guard lock(mutex_);
    if (engine_ == nullptr) return FailedPrecondition("the parameter server was not started yet");
    return engine_.get();
  }

  StatusOr<Metrics> metrics() {
    auto running = engine();
    if (!running.ok()) return running.status();
    return running.value()->metrics();
  }

  checkpoint::Replica replica() const { return {options_.replica_index, options_.replica_size}; }

 private:
  explicit ServerRole(const ParameterServer::Options& options) : options_(options) {}

  ParameterServer::Options options_;
  std::mutex mutex_;  // start and stop may come from different threads
  std::unique_ptr<ParameterServer> engine_;
};

std::unique_ptr<ServerRole> MakeServer(uint32_t replica_index, uint32_t replica_size,
                                       uint64_t capacity, uint32_t num_internal_shards,
                                       uint32_t num_handler_threads, bool read_only,
                                       const std::optional<store::TierOptions>& tier,
                                       const std::string& row_dtype) {
  ParameterServer::Options options;
  options.replica_index = replica_index;
  options.replica_size = replica_size;
  options.store = {.capacity = capacity,
                   .num_internal_shards = num_internal_shards,
                   .row_dtype = ValueOrRaise(store::RowDtypeOf(row_dtype))};
  options.rpc.num_handler_threads = num_handler_threads;
  options.read_only = read_only;
  options.tier = tier;
  return ValueOrRaise(ServerRole::Create(options));
}

uint16_t Start(ServerRole& self, const std::string& host, uint16_t port) {
  return ValueOrRaise(WithoutGil([&] { return self.Start(host, port); }));
}

void MarkLoaded(ServerRole& self) { ValueOrRaise(self.engine())->MarkLoaded(); }

void Stop(ServerRole& self, double timeout_s) {
  const auto timeout = Timeout(timeout_s);
  WithoutGil([&] {
    if (auto engine = self.engine(); engine.ok()) engine.value()->Stop(timeout);
  });
}

uint64_t Incarnation(ServerRole& self) { return ValueOrRaise(self.engine())->incarnation(); }

py::dict Durations(ServerRole& self) {
  return DurationsToDict(ValueOrRaise(self.engine())->durations());
}

}  // namespace

void BindParameterServer(py::module_& module) {
  py::class_<ServerRole> role(module, "ParameterServer", py::release_gil_before_calling_cpp_dtor());
  role.def(py::init(&MakeServer), py::kw_only(), py::arg("replica_index"), py::arg("replica_size"),
           py::arg("capacity"), py::arg("num_internal_shards"), py::arg("num_handler_threads") = 2,
           py::arg("read_only") = false, py::arg("tier") = py::none(),
           py::arg("row_dtype") = "float32")
      .def("start", &Start, py::arg("host"), py::arg("port"))
      .def("mark_loaded", &MarkLoaded)
      .def("stop", &Stop, py::arg("timeout_s") = 10.0)
      .def_property_readonly("incarnation", &Incarnation)
      .def("durations", &Durations);
  DefineMetrics(role, [](ServerRole& self) { return self.metrics(); });
  DefineStore(role, [](ServerRole& self) {
    return BoundStore{ValueOrRaise(self.engine())->embedding_store(), self.replica()};
  });
}

}  // namespace persia::bindings

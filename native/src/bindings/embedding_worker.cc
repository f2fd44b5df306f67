#include "worker/embedding_worker.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/metrics.h"
#include "bindings/module.h"
#include "bindings/placement.h"
#include "worker/worker_service.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;
using worker::EmbeddingWorker;
using worker::RemoteRows;
using worker::WorkerService;

// The embedding worker role: the engine between its connections to the servers and its service.
// Members are destroyed from the service down, so that no handler outlives what it uses.
struct WorkerRole {
  WorkerRole(std::shared_ptr<RemoteRows> servers, std::shared_ptr<EmbeddingWorker> worker,
             const net::ServerOptions& options)
      : rows(std::move(servers)), engine(std::move(worker)), service(engine, options) {}

  StatusOr<uint16_t> Start(const std::string& host, uint16_t port) {
    return service.Start(host, port);
  }
  // In this order: no request is begun any more when the channels close.
  void Stop(std::chrono::milliseconds timeout) {
    service.Stop(timeout);
    // What is left waits for servers that may be gone, and destruction waits for what is left.
    rows->Close();
  }
  Status SetServer(uint32_t index, const std::string& address) {
    return rows->SetServer(index, address);
  }
  Status ReplaceServers(const std::vector<std::string>& addresses, uint64_t generation,
                        const MovedShards& moved_shards) {
    PERSIA_ASSIGN_OR_RETURN(const Placement placement,
                            Placement::Create(static_cast<uint32_t>(addresses.size()), generation,
                                              FromPython(moved_shards)));
    rows->ReplaceServers(placement, addresses);
    return Status::Ok();
  }
  uint64_t ReleaseWaiting() { return engine->ReleaseWaiting(); }
  // One list for the role: the engine's numbers and those of its RPC server.
  Metrics metrics() const {
    Metrics metrics = engine->metrics();
    service.AddMetrics(&metrics);
    return metrics;
  }
  std::vector<const DurationStats*> durations() const {
    std::vector<const DurationStats*> all = engine->durations();
    for (const DurationStats* one : service.durations()) all.push_back(one);
    return all;
  }

  const std::shared_ptr<RemoteRows> rows;
  const std::shared_ptr<EmbeddingWorker> engine;
  WorkerService service;
};

std::unique_ptr<WorkerRole> MakeWorker(std::vector<worker::SlotConfig> slots,
                                       uint32_t feature_index_prefix_bit, uint32_t num_servers,
                                       uint64_t forward_buffer_size,
                                       uint32_t buffered_data_expired_s,
                                       uint32_t num_handler_threads, uint64_t generation,
                                       const MovedShards& moved_shards) {
  worker::WorkerOptions options{
      .feature_index_prefix_bit = feature_index_prefix_bit,
      .slots = std::move(slots),
      .forward_buffer_size = forward_buffer_size,
      .buffered_data_expired = std::chrono::seconds(buffered_data_expired_s)};
  const net::ServerOptions rpc{.num_handler_threads = num_handler_threads};
  auto rows = std::make_shared<RemoteRows>(
      ValueOrRaise(Placement::Create(num_servers, generation, FromPython(moved_shards))));
  return std::make_unique<WorkerRole>(
      rows, ValueOrRaise(EmbeddingWorker::Create(std::move(options), rows)), rpc);
}

// Called by the thread that answers loaders. The incarnation is known to Python: only the counter
// is returned.
uint64_t RegisterAtWorker(WorkerRole& self, uint32_t loader_index, const py::buffer& id_features) {
  const BytesArgument message(id_features, "id_features");
  return ValueOrRaise(
             WithoutGil([&] { return self.engine->Register(loader_index, message.bytes()); }))
      .reference;
}

// Keys are those that a parameter server has for the same numbers in its own status.
py::list ServerLoads(WorkerRole& self, worker::Deadline deadline) {
  py::list all;
  for (const ServerLoad& load :
       ValueOrRaise(WithoutGil([&] { return self.rows->Loads(deadline); }))) {
    all.append(py::dict("num_rows"_a = load.num_rows, "memory_bytes"_a = load.memory_bytes,
                        "num_looked_up_rows"_a = load.num_looked_up_rows,
                        "num_updated_rows"_a = load.num_updated_rows));
  }
  return all;
}

}  // namespace

void BindEmbeddingWorker(py::module_& module) {
  py::class_<WorkerRole> role(module, "EmbeddingWorker", py::release_gil_before_calling_cpp_dtor());
  role.def(py::init(&MakeWorker), py::kw_only(), py::arg("slots"),
           py::arg("feature_index_prefix_bit"), py::arg("num_servers"),
           py::arg("forward_buffer_size") = 1000, py::arg("buffered_data_expired_s") = 1000,
           py::arg("num_handler_threads") = worker::kMaxOrderedReturns, py::arg("generation") = 0,
           py::arg("moved_shards") = MovedShards())
      .def("set_server", Blocking(&WorkerRole::SetServer), py::arg("index"), py::arg("address"))
      .def("replace_servers", Blocking(&WorkerRole::ReplaceServers), py::arg("addresses"),
           py::kw_only(), py::arg("generation"), py::arg("moved_shards") = MovedShards())
      .def("start", Blocking(&WorkerRole::Start), py::arg("host"), py::arg("port"))
      .def("stop", Blocking(&WorkerRole::Stop), py::arg("timeout_s") = 10.0)
      .def("register_batch", &RegisterAtWorker, py::arg("loader_index"), py::arg("id_features"))
      .def("release_waiting", Blocking(&WorkerRole::ReleaseWaiting))
      .def_property_readonly("incarnation",
                             [](WorkerRole& self) { return self.engine->incarnation(); })
      .def_property_readonly(
          "moved_shards", [](WorkerRole& self) { return ToPython(self.rows->placement().moved()); })
      .def("durations", [](WorkerRole& self) { return DurationsToDict(self.durations()); })
      .def("server_loads", &ServerLoads, py::kw_only(), py::arg("timeout_s") = 60.0);
  DefineMetrics(role, [](WorkerRole& self) { return self.metrics(); });
  DefineEach(role, "slots", "slot_metrics",
             [](WorkerRole& self) { return self.engine->slot_stats(); });
  DefineEach(role, "channels", "channel_metrics",
             [](WorkerRole& self) { return self.rows->channel_stats(); });
}

}  // namespace persia::bindings

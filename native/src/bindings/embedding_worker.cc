#include "worker/embedding_worker.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/metrics.h"
#include "bindings/module.h"
#include "worker/worker_service.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using worker::EmbeddingWorker;
using worker::RemoteRows;
using worker::WorkerService;

// The embedding worker role: the engine between its connections to the servers and its service.
// Members are destroyed from the service down, so that nobody is called after its end.
class WorkerRole {
 public:
  static StatusOr<std::unique_ptr<WorkerRole>> Create(worker::WorkerOptions options,
                                                      uint32_t num_servers,
                                                      uint32_t num_handler_threads) {
    if (num_servers == 0) return InvalidArgument("num_servers: 0; at least 1 is needed");
    auto role = std::unique_ptr<WorkerRole>(new WorkerRole(num_servers, num_handler_threads));
    auto engine = EmbeddingWorker::Create(std::move(options), role->rows_);
    if (!engine.ok()) return engine.status();
    role->engine_ = std::move(engine).value();
    return role;
  }

  StatusOr<uint16_t> Start(const std::string& host, uint16_t port) {
    const std::lock_guard lock(mutex_);
    if (service_ != nullptr) return FailedPrecondition("the embedding worker was started already");
    net::ServerOptions options;
    options.host = host;
    options.port = port;
    options.num_handler_threads = num_handler_threads_;
    auto service = std::make_unique<WorkerService>(engine_, options);
    auto bound = service->Start();
    if (bound.ok()) service_ = std::move(service);
    return bound;
  }

  void Stop(std::chrono::milliseconds timeout) {
    const std::lock_guard lock(mutex_);
    if (service_ != nullptr) service_->Stop(timeout);
    // What is left waits for servers that may be gone, and destruction waits for what is left.
    rows_->Close();
  }

  Metrics metrics() {
    Metrics metrics = engine_->metrics();
    const std::lock_guard lock(mutex_);
    if (service_ != nullptr) {
      service_->AddMetrics(&metrics);
    } else {
      net::Server(net::ServerOptions()).AddMetrics(&metrics);  // zeros before Start()
    }
    return metrics;
  }

  // As long as the role lives: the service stays when it stops.
  std::vector<const DurationStats*> Durations() {
    std::vector<const DurationStats*> all = engine_->durations();
    const std::lock_guard lock(mutex_);
    if (service_ != nullptr) {
      for (const DurationStats* one : service_->durations()) all.push_back(one);
    }
    return all;
  }

  EmbeddingWorker& engine() { return *engine_; }
  RemoteRows& rows() { return *rows_; }

 private:
  WorkerRole(uint32_t num_servers, uint32_t num_handler_threads)
      : num_handler_threads_(num_handler_threads),
        rows_(std::make_shared<RemoteRows>(num_servers)) {}

  const uint32_t num_handler_threads_;
  std::shared_ptr<RemoteRows> rows_;
  std::shared_ptr<EmbeddingWorker> engine_;
  std::mutex mutex_;  // start and stop may come from different threads
  std::unique_ptr<WorkerService> service_;
};

std::unique_ptr<WorkerRole> MakeWorker(std::vector<worker::SlotConfig> slots,
                                       uint32_t feature_index_prefix_bit, uint32_t num_servers,
                                       uint32_t replica_index, uint64_t forward_buffer_size,
                                       uint32_t buffered_data_expired_s,
                                       uint32_t num_handler_threads) {
  worker::WorkerOptions options;
  options.replica_index = replica_index;
  options.feature_index_prefix_bit = feature_index_prefix_bit;
  options.slots = std::move(slots);
  options.forward_buffer_size = forward_buffer_size;
  options.buffered_data_expired = std::chrono::seconds(buffered_data_expired_s);
  return ValueOrRaise(WorkerRole::Create(std::move(options), num_servers, num_handler_threads));
}

void SetServer(WorkerRole& self, uint32_t index, const std::string& address) {
  RaiseIfError(WithoutGil([&] { return self.rows().SetServer(index, address); }));
}

uint16_t Start(WorkerRole& self, const std::string& host, uint16_t port) {
  return ValueOrRaise(WithoutGil([&] { return self.Start(host, port); }));
}

void Stop(WorkerRole& self, double timeout_s) {
  const auto timeout = Timeout(timeout_s);
  WithoutGil([&] { self.Stop(timeout); });
}

uint64_t RegisterBatch(WorkerRole& self, uint32_t loader_index, const py::buffer& id_features) {
  const BytesArgument message(id_features, "id_features");
  return ValueOrRaise(
             WithoutGil([&] { return self.engine().Register(loader_index, message.bytes()); }))
      .reference;
}

std::vector<uint64_t> ServerSizes(WorkerRole& self, double timeout_s) {
  const auto deadline = DeadlineAfter(timeout_s);
  return ValueOrRaise(WithoutGil([&] { return self.engine().Sizes(deadline); }));
}

py::list Slots(WorkerRole& self) {
  return SlotsToList(WithoutGil([&] { return self.engine().slot_stats(); }));
}

py::list Channels(WorkerRole& self) {
  return ChannelsToList(WithoutGil([&] { return self.rows().channel_stats(); }));
}

}  // namespace

void BindEmbeddingWorker(py::module_& module) {
  py::class_<WorkerRole> role(module, "EmbeddingWorker", py::release_gil_before_calling_cpp_dtor());
  role.def(py::init(&MakeWorker), py::kw_only(), py::arg("slots"),
           py::arg("feature_index_prefix_bit"), py::arg("num_servers"),
           py::arg("replica_index") = 0, py::arg("forward_buffer_size") = 1000,
           py::arg("buffered_data_expired_s") = 1000, py::arg("num_handler_threads") = 4)
      .def("set_server", &SetServer, py::arg("index"), py::arg("address"))
      .def("start", &Start, py::arg("host"), py::arg("port"))
      .def("stop", &Stop, py::arg("timeout_s") = 10.0)
      .def("register_batch", &RegisterBatch, py::arg("loader_index"), py::arg("id_features"))
      .def_property_readonly("incarnation",
                             [](WorkerRole& self) { return self.engine().incarnation(); })
      .def("slots", &Slots)
      .def("channels", &Channels)
      .def("durations", [](WorkerRole& self) { return DurationsToDict(self.Durations()); })
      .def("server_sizes", &ServerSizes, py::kw_only(), py::arg("timeout_s") = 60.0);
  DefineMetrics(role, [](WorkerRole& self) { return self.metrics(); });
}

}  // namespace persia::bindings

#include "server/parameter_server.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/metrics.h"
#include "bindings/module.h"
#include "bindings/placement.h"
#include "bindings/store.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;
using server::ParameterServer;

// With a tier this recovers the rows of its file, which may take minutes: the GIL is free
// meanwhile.
std::unique_ptr<ParameterServer> MakeServer(
    uint32_t replica_index, uint32_t replica_size, uint64_t capacity, uint32_t num_internal_shards,
    uint32_t num_handler_threads, bool read_only, const std::optional<store::TierOptions>& tier,
    const std::string& row_dtype, std::chrono::milliseconds standby_deadline, bool is_standby,
    uint32_t num_sources, const MovedShards& moved_shards) {
  ParameterServer::Options options;
  options.replica_index = replica_index;
  options.replica_size = replica_size;
  options.store.capacity = capacity;
  options.store.num_internal_shards = num_internal_shards;
  options.store.row_dtype = ValueOrRaise(store::RowDtypeOf(row_dtype));
  options.tier = tier;
  options.rpc.num_handler_threads = num_handler_threads;
  options.read_only = read_only;
  options.standby_deadline = standby_deadline;
  options.is_standby = is_standby;
  options.num_sources = num_sources;
  options.moved_shards = FromPython(moved_shards);
  return ValueOrRaise(WithoutGil([&] { return ParameterServer::Create(options); }));
}

// By StandbyLink::State and OperationLog::State.
constexpr std::array kLinkNames = {"alone", "replicating", "broken", "fenced"};
constexpr std::array kLogNames = {"following", "taken over", "renounced", "unfit"};

// A value error, not a crash: which end a server has follows from its arguments, and Python asks
// both kinds.
server::StandbyLink& LinkOf(ParameterServer& self) {
  if (self.standby() != nullptr) return *self.standby();
  throw py::value_error("the server was made without standby_deadline_s");
}

server::OperationLog& LogOf(ParameterServer& self) {
  if (self.log() != nullptr) return *self.log();
  throw py::value_error("the server was made without is_standby");
}

// More names than the link has states: "stalled" and "copying" are what an operator must tell apart
// in a link that replicates.
std::string ReplicationOf(ParameterServer& self) {
  const server::StandbyLink& link = LinkOf(self);
  const auto state = link.state();
  if (state != server::StandbyLink::State::kReplicating) return kLinkNames[size_t(state)];
  if (!link.CheckServes().ok()) return "stalled";
  return link.is_copying() ? "copying" : kLinkNames[size_t(state)];
}

// The primary's end of the replication, then the standby's.
template <typename Role>
void DefineReplication(Role& role) {
  role.def(
          "attach_standby",
          [](ParameterServer& self, const std::string& address, uint64_t incarnation) {
            server::StandbyLink& link = LinkOf(self);
            RaiseIfError(WithoutGil([&] { return link.Attach(address, incarnation); }));
          },
          py::arg("address"), py::arg("incarnation"))
      .def("release_standby",
           [](ParameterServer& self) {
             server::StandbyLink& link = LinkOf(self);
             WithoutGil([&] { link.Release(); });
           })
      .def(
          "fence",
          [](ParameterServer& self, const std::string& reason) {
            server::StandbyLink& link = LinkOf(self);
            WithoutGil([&] { link.Fence(reason); });
          },
          py::arg("reason"))
      .def_property_readonly("replication", &ReplicationOf)
      .def(
          "follow", [](ParameterServer& self, uint64_t primary) { LogOf(self).Follow(primary); },
          py::arg("primary"))
      .def("take_over", Blocking(&ParameterServer::TakeOver), py::arg("primary_has_ended"))
      .def("renounce", [](ParameterServer& self) { return LogOf(self).Renounce(); })
      .def_property_readonly(
          "standby_state",
          [](ParameterServer& self) { return kLogNames[size_t(LogOf(self).state())]; })
      .def_property_readonly("standby_failure",
                             [](ParameterServer& self) { return LogOf(self).failure().message(); })
      .def_property_readonly("silent_for_s",
                             [](ParameterServer& self) { return LogOf(self).silent_for().count(); })
      .def_property_readonly("has_copy",
                             [](ParameterServer& self) { return LogOf(self).has_copy(); });
}

// By RowTransfer::State.
constexpr std::array kTransferNames = {"copying", "following", "handed over", "failed"};

py::object TransferOf(ParameterServer& self) {
  const auto progress = WithoutGil([&] { return self.transfer_progress(); });
  if (!progress.has_value()) return py::none();
  return py::dict("state"_a = kTransferNames[size_t(progress->state)],
                  "num_bytes"_a = progress->num_bytes, "num_rows"_a = progress->num_rows,
                  "round_s"_a = progress->round_time.count(),
                  "failure"_a = progress->failure.message());
}

// The old server's end of a change of the number of servers, then the new one's.
template <typename Role>
void DefineTransfer(Role& role) {
  role.def(
          "begin_transfer",
          [](ParameterServer& self, const std::vector<std::pair<std::string, uint64_t>>& targets,
             const MovedShards& moved_shards, double max_processors,
             std::chrono::milliseconds deadline) {
            server::RowTransfer::Options options{
                .placement = ValueOrRaise(Placement::Create(static_cast<uint32_t>(targets.size()),
                                                            0, FromPython(moved_shards))),
                .max_processors = max_processors,
                .deadline = deadline};
            for (const auto& [address, incarnation] : targets) {
              options.targets.push_back({address, incarnation});
            }
            RaiseIfError(WithoutGil([&] { return self.BeginTransfer(options); }));
          },
          py::arg("targets"), py::kw_only(), py::arg("moved_shards") = MovedShards(),
          py::arg("max_processors"), py::arg("deadline_s"))
      .def("hand_over", Blocking(&ParameterServer::HandOver))
      .def("resume", [](ParameterServer& self) { WithoutGil([&] { self.Resume(); }); })
      .def("serve", Blocking(&ParameterServer::Serve))
      .def_property_readonly("transfer", &TransferOf)
      .def_property_readonly(
          "transfer_refusal",
          [](ParameterServer& self) { return self.CheckTransferable().message(); })
      .def_property_readonly(
          "moved_shards", [](ParameterServer& self) { return ToPython(self.placement().moved()); })
      .def_property_readonly("shard_loads", &ParameterServer::shard_loads)
      .def_property_readonly("has_handed_over", &ParameterServer::has_handed_over)
      .def_property_readonly("was_sent_rows", &ParameterServer::was_sent_rows);
}

}  // namespace

void BindParameterServer(py::module_& module) {
  py::class_<ParameterServer> role(module, "ParameterServer",
                                   py::release_gil_before_calling_cpp_dtor());
  role.def(py::init(&MakeServer), py::kw_only(), py::arg("replica_index"), py::arg("replica_size"),
           py::arg("capacity"), py::arg("num_internal_shards"), py::arg("num_handler_threads") = 2,
           py::arg("read_only") = false, py::arg("tier") = py::none(),
           py::arg("row_dtype") = "float32", py::arg("standby_deadline_s") = 0.0,
           py::arg("is_standby") = false, py::arg("num_sources") = 0,
           py::arg("moved_shards") = MovedShards())
      .def("start", Blocking(&ParameterServer::Start), py::arg("host"), py::arg("port"))
      .def("mark_loaded", &ParameterServer::MarkLoaded)
      .def("stop", Blocking(&ParameterServer::Stop), py::arg("timeout_s") = 10.0)
      .def_property_readonly("incarnation", &ParameterServer::incarnation)
      .def("durations", [](ParameterServer& self) { return DurationsToDict(self.durations()); });
  DefineReplication(role);
  DefineTransfer(role);
  DefineMetrics(role, [](ParameterServer& self) { return self.metrics(); });
  // A dump names each file by the server's place, so the store is bound together with it.
  DefineStore(role, [](ParameterServer& self) {
    return BoundStore{self.embedding_store(), [&self] {
                        return checkpoint::Replica{self.options().replica_index, self.placement()};
                      }};
  });
}

}  // namespace persia::bindings

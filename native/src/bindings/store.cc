#include "bindings/store.h"

#include <pybind11/numpy.h>

#include <cstdint>
#include <memory>
#include <span>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "checkpoint/loader.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using checkpoint::FileKind;
using checkpoint::Loader;
using checkpoint::Snapshot;
using store::EmbeddingStore;

std::unique_ptr<Snapshot> BeginSnapshot(BoundStore& self, uint32_t num_parts,
                                        uint64_t max_waiting_bytes, double patience_s,
                                        bool with_state, double max_processors) {
  const Snapshot::Options options{
      .num_parts = num_parts,
      .replica = self.replica,
      .rows = {.max_waiting_bytes = max_waiting_bytes, .patience = Timeout(patience_s)},
      .with_state = with_state,
      .max_processors = max_processors};
  return ValueOrRaise(WithoutGil([&] { return Snapshot::Begin(self.store, options); }));
}

std::unique_ptr<Snapshot> TakeChanges(BoundStore& self, uint32_t num_parts,
                                      uint64_t max_waiting_bytes, double patience_s) {
  const Snapshot::Options options{
      .num_parts = num_parts,
      .replica = self.replica,
      .rows = {.max_waiting_bytes = max_waiting_bytes, .patience = Timeout(patience_s)}};
  return ValueOrRaise(WithoutGil([&] { return Snapshot::TakeChanges(self.store, options); }));
}

// A method of the store, or of its tier, that takes and returns numbers.
template <typename Result, typename... Args>
auto OfStore(Result (EmbeddingStore::*method)(Args...)) {
  return [method](BoundStore& self, Args... args) {
    return ToPython(WithoutGil([&] { return (self.store.*method)(args...); }));
  };
}
template <typename Result, typename... Args>
auto OfTier(Result (store::StoreTier::*method)(Args...)) {
  return [method](BoundStore& self, Args... args) {
    return ToPython(WithoutGil([&] { return (self.store.tier().*method)(args...); }));
  };
}

py::dict ChangeStatus(BoundStore& self) {
  const store::ChangeStatus status = WithoutGil([&] { return self.store.change_status(); });
  py::dict dict;
  dict["max_rows"] = status.max_rows;
  dict["num_rows"] = status.num_rows;
  dict["is_due"] = status.is_due;
  dict["has_overflowed"] = status.has_overflowed;
  return dict;
}

std::unique_ptr<Loader> Load(BoundStore& self, const Loader::Options& options) {
  return ValueOrRaise(WithoutGil([&] { return Loader::Begin(self.store, options); }));
}

std::unique_ptr<Loader> BeginLoad(BoundStore& self, const TrainConfig& config, bool with_state,
                                  bool fresh_state) {
  return Load(self, {.config = config,
                     .kind = FileKind::kRows,
                     .with_state = with_state,
                     .fresh_state = fresh_state,
                     .replica = self.replica});
}

std::unique_ptr<Loader> BeginApply(BoundStore& self, const TrainConfig& config,
                                   bool is_from_nothing, bool with_state) {
  return Load(self, {.config = config,
                     .kind = is_from_nothing ? FileKind::kChangesFromNothing : FileKind::kChanges,
                     .with_state = with_state,
                     .replica = self.replica});
}

py::array_t<uint32_t> NumUpdates(BoundStore& self, py::handle signs) {
  const ArrayArgument<uint64_t> sign_array(signs, "signs", 1);
  py::array_t<uint32_t> counts(static_cast<py::ssize_t>(sign_array.values().size()));
  const std::span<uint32_t> out(counts.mutable_data(), sign_array.values().size());
  RaiseIfError(WithoutGil([&] { return self.store.NumUpdates(sign_array.values(), out); }));
  return counts;
}

// Keys are those of /status; persia/observability/metric_tables.py names the metrics among them.
py::object TierStats(BoundStore& self) {
  const auto stats = WithoutGil([&] { return self.store.tier().stats(); });
  if (!stats) return py::none();
  py::dict dict;
  dict["num_rows"] = stats->num_rows;
  dict["num_hot"] = stats->num_hot;
  dict["memory_bytes"] = stats->memory_bytes;
  dict["num_hits"] = stats->num_hits;
  dict["num_misses"] = stats->num_misses;
  dict["num_promoted"] = stats->num_promoted;
  dict["num_demoted"] = stats->num_demoted;
  dict["num_written"] = stats->num_written;
  dict["batch"] = stats->batch;
  dict["pool_bytes"] = stats->pool.size_bytes;
  dict["pool_max_bytes"] = stats->pool.max_bytes;
  dict["pool_used_bytes"] = stats->pool.used_bytes;
  dict["num_kept"] = stats->pool.num_kept;
  dict["committed"] = stats->pool.committed;
  dict["num_pending"] = stats->pool.num_pending;
  dict["num_prefetched"] = stats->num_prefetched;
  dict["num_unheeded"] = stats->num_unheeded;
  return dict;
}

py::object PreparedCheckpoint(BoundStore& self, uint64_t number) {
  const auto prepared =
      ValueOrRaise(WithoutGil([&] { return self.store.tier().PreparedCheckpoint(number); }));
  if (!prepared) return py::none();
  py::dict dict;
  dict["batch"] = prepared->batch;
  dict["num_rows"] = prepared->num_rows;
  dict["pool_id"] = prepared->pool_id;
  dict["sequence"] = prepared->sequence;
  return dict;
}

}  // namespace

void BindStore(py::module_& module) {
  const auto num_parts = py::arg("num_parts") = 1;
  const auto max_waiting_bytes = py::arg("max_waiting_bytes") = 256 << 20;
  const auto patience_s = py::arg("patience_s") = 10.0;
  const auto with_state = py::arg("with_state") = true;
  const py::keep_alive<0, 1> keep_store;
  py::class_<BoundStore>(module, "EmbeddingStore")
      .def("begin_snapshot", &BeginSnapshot, num_parts, py::kw_only(), max_waiting_bytes,
           patience_s, with_state, py::arg("max_processors") = 0.0, keep_store)
      .def("begin_load", &BeginLoad, py::arg("train_config"), py::kw_only(), with_state,
           py::arg("fresh_state") = false, keep_store)
      .def("track_changes", OfStore(&EmbeddingStore::TrackChanges), py::arg("max_rows"))
      .def("change_status", &ChangeStatus)
      .def("take_changes", &TakeChanges, num_parts, py::kw_only(), max_waiting_bytes, patience_s,
           keep_store)
      .def("begin_apply", &BeginApply, py::arg("train_config"), py::kw_only(),
           py::arg("is_from_nothing") = false, with_state, keep_store)
      .def("remove_small_rows", OfStore(&EmbeddingStore::RemoveSmallRows))
      .def("num_updates", &NumUpdates, py::arg("signs"))
      .def("tier_stats", &TierStats)
      .def("request_checkpoint",
           [](BoundStore& self) {
             return ToPython(
                 WithoutGil([&] { return self.store.tier().RequestCheckpoint(/*held=*/true); }));
           })
      .def("prepared_checkpoint", &PreparedCheckpoint, py::arg("number"))
      .def("commit_checkpoint", OfTier(&store::StoreTier::CommitCheckpoint), py::arg("number"))
      .def("drop_checkpoint", OfTier(&store::StoreTier::DropCheckpoint), py::arg("number"));
}

}  // namespace persia::bindings

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
using py::literals::operator""_a;
using checkpoint::FileKind;
using checkpoint::Loader;
using checkpoint::Snapshot;
using store::EmbeddingStore;
using store::StoreStats;

// Returns when the snapshot point is set. The rows are copied while parts are read, so the GIL is
// needed only to hand the bytes over.
std::unique_ptr<Snapshot> BeginSnapshot(BoundStore& self, uint32_t num_parts,
                                        uint64_t max_waiting_bytes, double patience_s,
                                        bool with_state, double max_processors) {
  const Snapshot::Options options{
      .num_parts = num_parts,
      .replica = self.replica(),
      .rows = {.max_waiting_bytes = max_waiting_bytes, .patience = Timeout(patience_s)},
      .with_state = with_state,
      .max_processors = max_processors};
  return ValueOrRaise(WithoutGil([&] { return Snapshot::Begin(self.store, options); }));
}

// The same for the rows that have changed since changes were last taken. What it takes is put back
// where the snapshot is closed without a commit.
std::unique_ptr<Snapshot> TakeChanges(BoundStore& self, uint32_t num_parts,
                                      uint64_t max_waiting_bytes, double patience_s) {
  const Snapshot::Options options{
      .num_parts = num_parts,
      .replica = self.replica(),
      .rows = {.max_waiting_bytes = max_waiting_bytes, .patience = Timeout(patience_s)}};
  return ValueOrRaise(WithoutGil([&] { return Snapshot::TakeChanges(self.store, options); }));
}

// A method of the store, or of its tier, that takes and returns numbers.
template <typename Result, typename Owner, typename... Args>
auto OfStore(Result (Owner::*method)(Args...)) {
  return [method](BoundStore& self, Args... args) {
    return ToPython(WithoutGil([&] {
      if constexpr (std::is_same_v<Owner, EmbeddingStore>) {
        return (self.store.*method)(args...);
      } else {
        return (self.store.tier().*method)(args...);
      }
    }));
  };
}

py::dict ChangeStatus(BoundStore& self) {
  const store::ChangeStatus status = WithoutGil([&] { return self.store.change_status(); });
  return py::dict("max_rows"_a = status.max_rows, "num_rows"_a = status.num_rows,
                  "is_due"_a = status.is_due, "has_overflowed"_a = status.has_overflowed);
}

std::unique_ptr<Loader> Load(BoundStore& self, const Loader::Options& options) {
  return ValueOrRaise(WithoutGil([&] { return Loader::Begin(self.store, options); }));
}

// The config is that of the checkpoint; the loader compares it with the store's own.
std::unique_ptr<Loader> BeginLoad(BoundStore& self, const TrainConfig& config, bool with_state,
                                  bool fresh_state) {
  return Load(self, {.config = config,
                     .kind = FileKind::kRows,
                     .with_state = with_state,
                     .fresh_state = fresh_state,
                     .replica = self.replica()});
}

// Changes are applied in one step: a lookup sees all of a packet or nothing of it.
std::unique_ptr<Loader> BeginApply(BoundStore& self, const TrainConfig& config,
                                   bool is_from_nothing, bool with_state) {
  return Load(self, {.config = config,
                     .kind = is_from_nothing ? FileKind::kChangesFromNothing : FileKind::kChanges,
                     .with_state = with_state,
                     .replica = self.replica()});
}

// Written in place, into the array that is returned.
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
  return py::dict("num_rows"_a = stats->num_rows, "num_hot"_a = stats->num_hot,
                  "memory_bytes"_a = stats->memory_bytes, "num_hits"_a = stats->num_hits,
                  "num_misses"_a = stats->num_misses, "num_promoted"_a = stats->num_promoted,
                  "num_demoted"_a = stats->num_demoted, "num_written"_a = stats->num_written,
                  "batch"_a = stats->batch, "pool_bytes"_a = stats->pool.size_bytes,
                  "pool_max_bytes"_a = stats->pool.max_bytes,
                  "pool_used_bytes"_a = stats->pool.used_bytes, "num_kept"_a = stats->pool.num_kept,
                  "committed"_a = stats->pool.committed, "num_pending"_a = stats->pool.num_pending,
                  "num_prefetched"_a = stats->num_prefetched,
                  "num_unheeded"_a = stats->num_unheeded);
}

py::object PreparedCheckpoint(BoundStore& self, uint64_t number) {
  const auto prepared =
      ValueOrRaise(WithoutGil([&] { return self.store.tier().PreparedCheckpoint(number); }));
  if (!prepared) return py::none();
  return py::dict("batch"_a = prepared->batch, "num_rows"_a = prepared->num_rows,
                  "pool_id"_a = prepared->pool_id, "sequence"_a = prepared->sequence);
}

// An object rather than a dict: users read it (EmbeddingBagCollection.stats()).
void BindStats(py::module_& module) {
  py::class_<StoreStats>(module, "StoreStats")
      .def_readonly("num_rows", &StoreStats::num_rows)
      .def_readonly("memory_bytes", &StoreStats::memory_bytes)
      .def_property_readonly("num_inserted",
                             [](const StoreStats& s) { return s.lookups.num_inserted; })
      .def_property_readonly("num_evicted",
                             [](const StoreStats& s) { return s.lookups.num_evicted; })
      .def_property_readonly("num_unadmitted",
                             [](const StoreStats& s) { return s.lookups.num_unadmitted; })
      .def_property_readonly("num_updated",
                             [](const StoreStats& s) { return s.updates.num_updated; })
      .def_property_readonly("num_missing",
                             [](const StoreStats& s) { return s.updates.num_missing; })
      .def_property_readonly("num_nonfinite",
                             [](const StoreStats& s) { return s.updates.num_nonfinite; });
}

}  // namespace

void BindStore(py::module_& module) {
  BindStats(module);
  const auto num_parts = py::arg("num_parts") = 1;
  const auto max_waiting_bytes = py::arg("max_waiting_bytes") = 256 << 20;
  const auto patience_s = py::arg("patience_s") = 10.0;
  const auto with_state = py::arg("with_state") = true;
  // Snapshots and loaders hold a reference to the store, so its owner must live as long as they.
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
      .def("stats",
           [](const BoundStore& self) { return WithoutGil([&] { return self.store.stats(); }); })
      .def("tier_stats", &TierStats)
      .def("request_checkpoint",
           [](BoundStore& self) {
             return ToPython(
                 WithoutGil([&] { return self.store.tier().RequestCheckpoint(/*held=*/true); }));
           })
      .def("prepared_checkpoint", &PreparedCheckpoint, py::arg("number"))
      .def("commit_checkpoint", OfStore(&store::StoreTier::CommitCheckpoint), py::arg("number"))
      .def("drop_checkpoint", OfStore(&store::StoreTier::DropCheckpoint), py::arg("number"));
}

}  // namespace persia::bindings

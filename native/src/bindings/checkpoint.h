// begin_snapshot(), begin_load() and the same of changes, which every class that has a store offers
// in the same way.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "base/train_config.h"
#include "checkpoint/loader.h"
#include "checkpoint/snapshot.h"
#include "store/embedding_store.h"

namespace persia::bindings {

// A store and where it stands in its cluster.
struct PlacedStore {
  store::EmbeddingStore& store;
  checkpoint::Replica replica;
};

// All of them raise, and release the GIL.
std::unique_ptr<checkpoint::Snapshot> BeginSnapshot(PlacedStore placed, bool changes_only,
                                                    uint32_t num_parts, uint64_t max_waiting_bytes,
                                                    double patience_s, bool with_state = true,
                                                    double max_processors = 0);
uint64_t RemoveSmallRows(PlacedStore placed);
void TrackChanges(PlacedStore placed, uint64_t max_rows);
pybind11::dict ChangeStatus(PlacedStore placed);
std::unique_ptr<checkpoint::Loader> BeginLoad(PlacedStore placed, const TrainConfig& config,
                                              checkpoint::FileKind kind, bool with_state,
                                              bool fresh_state = false);

// `place(self)` returns the PlacedStore of an object of the class.
template <typename Class, typename Place>
void DefineCheckpoints(Class& bound, Place place) {
  namespace py = pybind11;
  using Self = typename Class::type;
  bound.def(
      "begin_snapshot",
      [place](Self& self, uint32_t num_parts, uint64_t max_waiting_bytes, double patience_s,
              bool with_state, double max_processors) {
        return BeginSnapshot(place(self), /*changes_only=*/false, num_parts, max_waiting_bytes,
                             patience_s, with_state, max_processors);
      },
      py::arg("num_parts") = 1, py::kw_only(), py::arg("max_waiting_bytes") = 256 << 20,
      py::arg("patience_s") = 10.0, py::arg("with_state") = true, py::arg("max_processors") = 0.0,
      py::keep_alive<0, 1>());
  bound.def(
      "take_changes",
      [place](Self& self, uint32_t num_parts, uint64_t max_waiting_bytes, double patience_s) {
        return BeginSnapshot(place(self), /*changes_only=*/true, num_parts, max_waiting_bytes,
                             patience_s);
      },
      py::arg("num_parts") = 1, py::kw_only(), py::arg("max_waiting_bytes") = 256 << 20,
      py::arg("patience_s") = 10.0, py::keep_alive<0, 1>());
  bound.def(
      "track_changes",
      [place](Self& self, uint64_t max_rows) { TrackChanges(place(self), max_rows); },
      py::arg("max_rows"));
  bound.def("remove_small_rows", [place](Self& self) { return RemoveSmallRows(place(self)); });
  bound.def("change_status", [place](Self& self) { return ChangeStatus(place(self)); });
  bound.def(
      "begin_load",
      [place](Self& self, const TrainConfig& config, bool with_state, bool fresh_state) {
        return BeginLoad(place(self), config, checkpoint::FileKind::kRows, with_state, fresh_state);
      },
      py::arg("train_config"), py::kw_only(), py::arg("with_state") = true,
      py::arg("fresh_state") = false, py::keep_alive<0, 1>());
  bound.def(
      "begin_apply",
      [place](Self& self, const TrainConfig& config, bool is_from_nothing, bool with_state) {
        const auto kind = is_from_nothing ? checkpoint::FileKind::kChangesFromNothing
                                          : checkpoint::FileKind::kChanges;
        return BeginLoad(place(self), config, kind, with_state);
      },
      py::arg("train_config"), py::kw_only(), py::arg("is_from_nothing") = false,
      py::arg("with_state") = true, py::keep_alive<0, 1>());
}

}  // namespace persia::bindings

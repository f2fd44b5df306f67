#include "client/embedding_bags.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "bindings/store.h"
#include "client/bag_batch.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using client::BagBatchPtr;
using client::EmbeddingBags;
using client::EmbeddingBagsOptions;
using client::PooledBags;
using store::LookupMode;
using store::UpdateReport;

// `counts_updates` costs four bytes a row, which is why it is asked for.
std::unique_ptr<EmbeddingBags> Make(std::vector<worker::SlotConfig> slots,
                                    uint32_t feature_index_prefix_bit, uint64_t capacity,
                                    uint32_t num_internal_shards, uint32_t num_threads,
                                    bool counts_updates, const std::string& row_dtype) {
  return ValueOrRaise(
      EmbeddingBags::Create({.slots = std::move(slots),
                             .feature_index_prefix_bit = feature_index_prefix_bit,
                             .store = {.capacity = capacity,
                                       .num_internal_shards = num_internal_shards,
                                       .counts_updates = counts_updates,
                                       .row_dtype = ValueOrRaise(store::RowDtypeOf(row_dtype))},
                             .num_threads = num_threads}));
}

// The rows as an array that gives its memory back when the last view of it goes.
py::array_t<float> RowsOf(PooledBags pooled, py::ssize_t num_columns) {
  const py::ssize_t batch_size = pooled.batch_size;
  const auto* data = reinterpret_cast<const float*>(pooled.rows.data());
  return ViewOf(data, {batch_size, num_columns}, OwnerOf(std::move(pooled.rows)));
}

std::pair<py::array_t<float>, BagBatchPtr> Lookup(EmbeddingBags& self, py::handle values,
                                                  py::handle lengths, bool train,
                                                  const py::object& weights) {
  const ArrayArgument<uint64_t> ids(values, "values", 1);
  const ArrayArgument<int64_t> counts(lengths, "lengths", 2);
  // Checked here, where the shape is known: the engine gets a flat span of lengths.
  if (counts.shape(0) != self.num_slots()) {
    RaiseIfError(InvalidArgument("lengths has ", counts.shape(0),
                                 " rows, must have one for each of the ", self.num_slots(),
                                 " slots"));
  }
  const LookupMode mode = train ? LookupMode::kTrain : LookupMode::kInference;
  // Kept until the lookup has returned: the engine reads the weights in place.
  std::optional<ArrayArgument<float>> weight_array;
  if (!weights.is_none()) weight_array.emplace(weights, "weights", 1);
  const auto weight_values = weight_array ? weight_array->values() : std::span<const float>();
  PooledBags pooled = ValueOrRaise(
      WithoutGil([&] { return self.Lookup(ids.values(), counts.values(), mode, weight_values); }));
  BagBatchPtr batch = std::move(pooled.batch);
  return {RowsOf(std::move(pooled), self.num_columns()), std::move(batch)};
}

// Runs without the GIL, like the lookup: other threads of the script run meanwhile.
UpdateReport Update(EmbeddingBags& self, const BagBatchPtr& batch, py::handle gradients) {
  const ArrayArgument<float> array(gradients, "gradients", 2);
  return ValueOrRaise(WithoutGil([&] { return self.Update(*batch, array.values()); }));
}

// The engine compares the counts and refuses what is not finite; only the types end here.
void SetRows(EmbeddingBags& self, uint32_t slot, py::handle ids, py::handle rows) {
  const ArrayArgument<uint64_t> id_array(ids, "ids", 1);
  const ArrayArgument<float> row_array(rows, "rows", 2);
  RaiseIfError(
      WithoutGil([&] { return self.SetRows(slot, id_array.values(), row_array.values()); }));
}

void BindReports(py::module_& module) {
  // Opaque: what a lookup hands to the update.
  py::class_<client::BagBatch, BagBatchPtr>(module, "BagBatch");
  // An object rather than a dict: users read it.
  py::class_<UpdateReport>(module, "UpdateReport")
      .def_readonly("num_updated", &UpdateReport::num_updated)
      .def_readonly("num_missing", &UpdateReport::num_missing)
      .def_readonly("num_nonfinite", &UpdateReport::num_nonfinite);
}

}  // namespace

void BindEmbeddingBags(py::module_& module) {
  BindReports(module);
  py::class_<EmbeddingBags> bags(module, "EmbeddingBags",
                                 py::release_gil_before_calling_cpp_dtor());
  bags.def(py::init(&Make), py::kw_only(), py::arg("slots"), py::arg("feature_index_prefix_bit"),
           py::arg("capacity") = 1'000'000'000, py::arg("num_internal_shards") = 16,
           py::arg("num_threads") = 1, py::arg("counts_updates") = false,
           py::arg("row_dtype") = "float32")
      .def("configure", Blocking(&EmbeddingBags::Configure), py::arg("config"), py::kw_only(),
           py::arg("replace") = false)
      .def("lookup", &Lookup, py::arg("values"), py::arg("lengths"), py::kw_only(),
           py::arg("train"), py::arg("weights") = py::none())
      .def("update", &Update, py::arg("batch"), py::arg("gradients"))
      .def("set_rows", &SetRows, py::arg("slot"), py::arg("ids"), py::arg("rows"))
      .def("stats", Blocking(&EmbeddingBags::stats))
      .def("clear", Blocking(&EmbeddingBags::Clear));
  DefineStore(bags, [](EmbeddingBags& self) { return BoundStore{self.embedding_store()}; });
}

}  // namespace persia::bindings

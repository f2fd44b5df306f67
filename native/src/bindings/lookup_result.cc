#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "worker/device_pack.h"
#include "worker/embeddings_message.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using worker::BatchReference;
using worker::LookupResult;
using worker::ReturnReport;

// A slot of a result. It and every array made from
// it hold the result, whose storage the rows lie in.
struct SlotView {
  std::shared_ptr<LookupResult> result;
  size_t position;

  const worker::SlotEmbedding& slot() const { return result->slots[position]; }
  py::ssize_t batch_size() const { return result->batch_size; }
};

// A view for each slot; making it copies no row.
py::list SlotsOf(const std::shared_ptr<LookupResult>& result) {
  py::list slots;
  for (size_t i = 0; i < result->slots.size(); ++i) slots.append(SlotView{result, i});
  return slots;
}

// The array's owner is the result, which numpy keeps: the slots of a batch may outlive every other
// reference to it.
py::array_t<float> Rows(const SlotView& view) {
  const auto& slot = view.slot();
  return ViewOf(slot.rows, {slot.num_rows, slot.dim}, py::cast(view.result));
}

// None for pooled slots, whose rows are the samples.
std::optional<py::array_t<int64_t>> Index(const SlotView& view) {
  const auto& slot = view.slot();
  if (!slot.raw) return std::nullopt;
  return ViewOf(slot.index, {view.batch_size(), slot.sample_fixed_size}, py::cast(view.result));
}

std::optional<py::array_t<uint32_t>> SampleNumIds(const SlotView& view) {
  const auto& slot = view.slot();
  if (!slot.raw) return std::nullopt;
  return ViewOf(slot.sample_num_ids, {view.batch_size()}, py::cast(view.result));
}

// (slots, staleness) of each lookup. Which modes the bits stand for is known to the pipeline.
std::vector<std::pair<uint32_t, uint64_t>> LookupsOf(const ReturnReport& report) {
  std::vector<std::pair<uint32_t, uint64_t>> lookups;
  for (const auto& lookup : report.lookups) lookups.emplace_back(lookup.slots, lookup.staleness);
  return lookups;
}

// The place of an array that is there.
std::optional<uint64_t> PlaceOf(uint64_t place) {
  return place == worker::kNoPlace ? std::nullopt : std::optional(place);
}

// Without the GIL: lookup threads fill packs while the loop runs.
void FillPack(const LookupResult& result, const worker::PackLayout& layout,
              const py::buffer& buffer) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  if (info.itemsize != 1 || info.ndim != 1 || info.strides[0] != 1 ||
      static_cast<uint64_t>(info.size) < layout.size_bytes) {
    RaiseIfError(InvalidArgument("pack: pass at least ", layout.size_bytes, " contiguous bytes"));
  }
  WithoutGil([&] { worker::FillPack(result, layout, static_cast<std::byte*>(info.ptr)); });
}

void BindPack(py::module_& module) {
  using worker::PackedBlock, worker::PackedSlot, worker::PackLayout;
  py::class_<PackedBlock>(module, "PackedBlock")
      .def_readonly("dim", &PackedBlock::dim)
      .def_readonly("slots", &PackedBlock::slots)
      .def_readonly("first_rows", &PackedBlock::first_rows)
      .def_readonly("num_numbers", &PackedBlock::num_numbers)
      .def_readonly("rows", &PackedBlock::rows)
      .def_readonly("numbers", &PackedBlock::numbers)
      .def_property_readonly("offsets", [](const PackedBlock& b) { return PlaceOf(b.offsets); })
      .def_property_readonly("factors", [](const PackedBlock& b) { return PlaceOf(b.factors); });
  py::class_<PackedSlot>(module, "PackedSlot")
      .def_readonly("position", &PackedSlot::position)
      .def_readonly("rows", &PackedSlot::rows)
      .def_property_readonly("index", [](const PackedSlot& s) { return PlaceOf(s.index); });
  py::class_<PackLayout>(module, "PackLayout")
      .def_readonly("batch_size", &PackLayout::batch_size)
      .def_readonly("blocks", &PackLayout::blocks)
      .def_readonly("slots", &PackLayout::slots)
      .def_readonly("size_bytes", &PackLayout::size_bytes);
}

void BindReturnReport(py::module_& module) {
  py::class_<ReturnReport>(module, "ReturnReport")
      .def_property_readonly("staleness", [](const ReturnReport& r) { return r.update.staleness; })
      .def_property_readonly("lookups", &LookupsOf)
      .def_property_readonly("num_updated",
                             [](const ReturnReport& r) { return r.update.num_updated; })
      .def_property_readonly("num_missing",
                             [](const ReturnReport& r) { return r.update.num_missing; })
      .def_readonly("num_nonfinite_slots", &ReturnReport::num_nonfinite_slots)
      .def_readonly("num_skipped_slots", &ReturnReport::num_skipped_slots);
}

}  // namespace

void BindLookupResult(py::module_& module) {
  py::class_<BatchReference>(module, "BatchReference")
      .def(py::init([](uint32_t worker_index, uint64_t worker_incarnation, uint64_t reference) {
             return BatchReference{{worker_incarnation, reference}, worker_index};
           }),
           py::arg("worker_index"), py::arg("worker_incarnation"), py::arg("reference"))
      .def_readonly("worker_index", &BatchReference::worker_index)
      .def_readonly("worker_incarnation", &BatchReference::worker_incarnation)
      .def_readonly("reference", &BatchReference::reference);
  py::class_<SlotView>(module, "SlotEmbedding")
      .def_property_readonly("name", [](const SlotView& view) { return view.slot().name; })
      .def_property_readonly("raw", [](const SlotView& view) { return view.slot().raw; })
      .def_property_readonly("absent", [](const SlotView& view) { return view.slot().absent; })
      .def_property_readonly("sample_fixed_size",
                             [](const SlotView& view) { return view.slot().sample_fixed_size; })
      .def_property_readonly("dim", [](const SlotView& view) { return view.slot().dim; })
      .def_property_readonly("num_rows", [](const SlotView& view) { return view.slot().num_rows; })
      .def_property_readonly("rows", &Rows)
      .def_property_readonly("index", &Index)
      .def_property_readonly("sample_num_ids", &SampleNumIds);
  BindPack(module);
  py::class_<LookupResult, std::shared_ptr<LookupResult>>(module, "LookupResult")
      .def_property_readonly("reference", [](const LookupResult& r) { return r.reference; })
      .def_readonly("batch_size", &LookupResult::batch_size)
      .def_property_readonly("slots", &SlotsOf)
      .def("lay_out_pack", &worker::LayOutPack)
      .def("fill_pack", &FillPack, py::arg("layout"), py::arg("buffer"));
  BindReturnReport(module);
}

}  // namespace persia::bindings

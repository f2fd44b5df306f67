#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/metrics.h"
#include "bindings/module.h"
#include "bindings/store.h"
#include "client/embedded_client.h"
#include "client/remote_client.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using client::BatchReference;
using client::Deadline;
using client::EmbeddedClient;
using client::EmbeddingClient;
using client::LookupResult;
using client::RemoteClient;
using client::SlotGradient;
using client::SlotMask;

// As Python gives them: (slot, rows), (slot, (sums by distinct row, greatest magnitude)), or
// (slot, None) for a slot without a gradient.
using GradientList = std::vector<std::pair<std::string, py::object>>;

// The bytes stay valid without the GIL: BytesArgument holds the buffer.
LookupResult LookupDirect(EmbeddingClient& self, uint32_t worker_index,
                          const py::buffer& id_features, bool requires_grad, Deadline deadline,
                          SlotMask slots, const BatchReference& original, bool as_rows) {
  const BytesArgument message(id_features, "id_features");
  return ValueOrRaise(WithoutGil([&] {
    return self.LookupDirect(worker_index, message.bytes(), requires_grad, deadline, slots,
                             original, as_rows);
  }));
}

// The gradients of one call, with the arrays they point into.
// The slots point into the arrays' memory, so both live until the call has returned.
struct Gradients {
  std::vector<ArrayArgument<float>> arrays;
  std::vector<SlotGradient> slots;
};

Gradients CheckedGradients(const GradientList& gradients) {
  Gradients checked;
  // No reallocation: the slots hold pointers, and names that `gradients` owns.
  checked.arrays.reserve(gradients.size());
  for (const auto& [slot, rows] : gradients) {
    if (rows.is_none()) {
      checked.slots.push_back({.slot = slot, .skipped = true});
      continue;
    }
    const bool summed = py::isinstance<py::tuple>(rows);
    const py::object sums = summed ? py::object(rows[py::int_(0)]) : rows;
    const auto& array = checked.arrays.emplace_back(sums, "gradient of slot '" + slot + "'", 2);
    checked.slots.push_back({.slot = slot,
                             .num_rows = array.shape(0),
                             .dim = array.shape(1),
                             .rows = array.data(),
                             .summed = summed,
                             .max_magnitude = summed ? rows[py::int_(1)].cast<float>() : 0.0f});
  }
  return checked;
}

worker::ReturnReport ReturnGradients(EmbeddingClient& self, const BatchReference& reference,
                                     const GradientList& gradients, float scale,
                                     Deadline deadline) {
  const Gradients checked = CheckedGradients(gradients);
  return ValueOrRaise(
      WithoutGil([&] { return self.ReturnGradients(reference, scale, checked.slots, deadline); }));
}

void BeginExact(RemoteClient& self, std::vector<worker::SlotConfig> slots,
                uint32_t feature_index_prefix_bit, SlotMask served, uint64_t max_bytes) {
  RaiseIfError(self.BeginExact(ValueOrRaise(
      client::ExactRows::Create(feature_index_prefix_bit, std::move(slots), served, max_bytes))));
}

LookupResult LookupWhole(RemoteClient& self, const BatchReference& reference,
                         const py::buffer& id_features, Deadline deadline) {
  const BytesArgument message(id_features, "id_features");
  return ValueOrRaise(
      WithoutGil([&] { return self.LookupWhole(reference, message.bytes(), deadline); }));
}

void ApplyExact(RemoteClient& self, const BatchReference& reference, const GradientList& gradients,
                float scale) {
  const Gradients checked = CheckedGradients(gradients);
  RaiseIfError(WithoutGil([&] { return self.ApplyExact(reference, scale, checked.slots); }));
}

uint64_t NumMissingRows(EmbeddedClient& self) {
  return WithoutGil([&] { return self.embedding_store().stats().lookups.num_missing; });
}

// The counts are compared here, where they are still the caller's arrays; the engine sees a flat
// span.
void SetEmbeddings(EmbeddingClient& self, const py::object& signs, const py::object& rows,
                   Deadline deadline) {
  const ArrayArgument<uint64_t> sign_array(signs, "signs", 1);
  const ArrayArgument<float> row_array(rows, "rows", 2);
  if (row_array.shape(0) != sign_array.shape(0)) {
    RaiseIfError(
        InvalidArgument("rows: ", row_array.shape(0), " rows for ", sign_array.shape(0), " signs"));
  }
  const auto dim = row_array.shape(1);
  RaiseIfError(WithoutGil(
      [&] { return self.SetEmbeddings(dim, sign_array.values(), row_array.values(), deadline); }));
}

// With a tier this recovers the rows of its file, which may take minutes, so the GIL is released.
std::shared_ptr<EmbeddedClient> MakeEmbedded(std::vector<worker::SlotConfig> slots,
                                             uint32_t feature_index_prefix_bit, uint64_t capacity,
                                             uint32_t num_internal_shards,
                                             uint64_t forward_buffer_size,
                                             const std::optional<store::TierOptions>& tier,
                                             const std::string& row_dtype) {
  worker::WorkerOptions options{.feature_index_prefix_bit = feature_index_prefix_bit,
                                .slots = std::move(slots),
                                .forward_buffer_size = forward_buffer_size};
  const store::EmbeddingStore::Options store{
      .capacity = capacity,
      .num_internal_shards = num_internal_shards,
      .row_dtype = ValueOrRaise(store::RowDtypeOf(row_dtype))};
  return ValueOrRaise(
      WithoutGil([&] { return EmbeddedClient::Create(std::move(options), store, tier); }));
}

// A with block: EmbeddingClient::BeginOtherRows.
struct OtherRows {
  std::shared_ptr<EmbeddingClient> client;
  std::string what;
};

BatchReference RegisterBatch(EmbeddedClient& self, uint32_t loader_index,
                             const py::buffer& id_features) {
  const BytesArgument message(id_features, "id_features");
  return ValueOrRaise(WithoutGil([&] { return self.Register(loader_index, message.bytes()); }));
}

// Apart from the interface: Python code takes an EmbeddingClient and does not know which one it
// has.
void BindImplementations(py::module_& module) {
  py::class_<RemoteClient, EmbeddingClient, std::shared_ptr<RemoteClient>> remote(
      module, "RemoteClient", py::release_gil_before_calling_cpp_dtor());
  remote
      .def(py::init([](uint32_t num_workers, const std::string& wire_dtype) {
             const auto dtype = ValueOrRaise(worker::ParseWireDtype(wire_dtype));
             return ValueOrRaise(RemoteClient::Create(num_workers, dtype));
           }),
           py::arg("num_workers"), py::kw_only(), py::arg("wire_dtype") = "float32")
      .def("set_worker", Blocking(&RemoteClient::SetWorker), py::arg("index"), py::arg("address"))
      .def("retire_worker", Blocking(&RemoteClient::RetireWorker), py::arg("index"))
      .def("drop_worker", Blocking(&RemoteClient::DropWorker), py::arg("index"))
      .def("begin_exact", &BeginExact, py::kw_only(), py::arg("slots"),
           py::arg("feature_index_prefix_bit"), py::arg("served") = client::kAllSlots,
           py::arg("max_bytes") = client::ExactRows::kMaxBytes)
      .def("end_exact", Blocking(&RemoteClient::EndExact))
      .def("lookup_whole", &LookupWhole, py::arg("reference"), py::arg("id_features"),
           py::kw_only(), py::arg("timeout_s") = 60.0)
      .def("pool_exact", Blocking(&RemoteClient::PoolExact), py::arg("reference"))
      .def("apply_exact", &ApplyExact, py::arg("reference"), py::arg("gradients"), py::kw_only(),
           py::arg("scale") = 1.0)
      .def("fail_exact", Blocking(&RemoteClient::FailExact), py::arg("reference"), py::arg("what"))
      .def("exact_metrics",
           [](RemoteClient& self) {
             const auto rows = self.exact_rows();
             return MetricsToList(rows == nullptr ? Metrics() : rows->metrics());
           })
      .def("durations", [](RemoteClient& self) { return DurationsToDict(self.durations()); });
  DefineEach(remote, "channels", "channel_metrics",
             [](RemoteClient& self) { return self.channel_stats(); });
  py::class_<EmbeddedClient, EmbeddingClient, std::shared_ptr<EmbeddedClient>> embedded(
      module, "EmbeddedClient", py::release_gil_before_calling_cpp_dtor());
  embedded
      .def(py::init(&MakeEmbedded), py::kw_only(), py::arg("slots"),
           py::arg("feature_index_prefix_bit"), py::arg("capacity") = 1'000'000'000,
           py::arg("num_internal_shards") = 16, py::arg("forward_buffer_size") = 1000,
           py::arg("tier") = py::none(), py::arg("row_dtype") = "float32")
      .def("register_batch", &RegisterBatch, py::arg("loader_index"), py::arg("id_features"))
      .def("num_missing_rows", &NumMissingRows);
  DefineStore(embedded, [](EmbeddedClient& self) { return BoundStore{self.embedding_store()}; });
}

}  // namespace

void BindClient(py::module_& module) {
  const auto timeout = py::arg("timeout_s") = 60.0;
  const auto slots = py::arg("slots") = client::kAllSlots;
  const auto as_rows = py::arg("as_rows") = false;
  py::class_<OtherRows>(module, "OtherRows")
      .def("__enter__",
           [](const OtherRows& self) {
             RaiseIfError(WithoutGil([&] { return self.client->BeginOtherRows(self.what); }));
           })
      .def("__exit__", [](const OtherRows& self, const py::args&) {
        WithoutGil([&] { self.client->EndOtherRows(); });
      });
  // The destructor may wait for threads that need the GIL to end their callbacks; so it runs
  // without it. The same holds for every role below.
  py::class_<EmbeddingClient, std::shared_ptr<EmbeddingClient>>(
      module, "EmbeddingClient", py::release_gil_before_calling_cpp_dtor())
      .def("configure", Blocking(&EmbeddingClient::Configure), py::arg("config"), py::kw_only(),
           py::arg("replace") = false, timeout)
      .def("lookup", Blocking(&EmbeddingClient::Lookup), py::arg("reference"), py::kw_only(),
           py::arg("requires_grad"), timeout, slots, as_rows)
      .def("lookup_direct", &LookupDirect, py::arg("worker_index"), py::arg("id_features"),
           py::kw_only(), py::arg("requires_grad"), timeout, slots,
           py::arg_v("original", BatchReference(), "..."), as_rows)
      .def("return_gradients", &ReturnGradients, py::arg("reference"), py::arg("gradients"),
           py::kw_only(), py::arg("scale") = 1.0, timeout)
      .def("release", Blocking(&EmbeddingClient::Release), py::arg("reference"), py::kw_only(),
           timeout)
      .def("set_embeddings", &SetEmbeddings, py::arg("signs"), py::arg("rows"), py::kw_only(),
           timeout)
      .def("clear", Blocking(&EmbeddingClient::Clear), py::kw_only(), timeout)
      .def("sizes", Blocking(&EmbeddingClient::Sizes), py::kw_only(), timeout)
      .def(
          "other_rows",
          [](std::shared_ptr<EmbeddingClient> self, std::string what) {
            return OtherRows{std::move(self), std::move(what)};
          },
          py::arg("what"));
  BindImplementations(module);
}

}  // namespace persia::bindings

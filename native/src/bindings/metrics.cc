#include "bindings/metrics.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "base/trace_buffer.h"
#include "bindings/errors.h"
#include "bindings/module.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

constexpr double kSecondsPerNs = 1e-9;
constexpr size_t kMaxTraceSpans = 4'000'000;

// Upper bounds of all buckets but the last, which has none; Prometheus adds "+Inf" to them.
py::tuple BoundsInSeconds() {
  py::tuple bounds(DurationStats::kNumBuckets - 1);
  for (size_t i = 0; i + 1 < DurationStats::kNumBuckets; ++i) {
    bounds[i] = static_cast<double>(DurationStats::UpperBoundNs(i)) * kSecondsPerNs;
  }
  return bounds;
}

void Record(DurationStats& self, uint64_t begin_ns, uint64_t end_ns, uint64_t reference,
            uint64_t batch_id) {
  self.Record(ToTime(begin_ns), ToTime(end_ns), reference, batch_id);
}

// `with TracedBatch(batch_id): ...`, on one thread.
// An optional, because Python's object exists before the scope begins and after it has ended.
class BatchScope {
 public:
  explicit BatchScope(uint64_t batch_id) : tag_(TracedBatch::TagOf(batch_id)) {}
  void Enter() { scope_.emplace(tag_); }
  void Exit(const py::args&) { scope_.reset(); }

 private:
  const uint32_t tag_;
  std::optional<TracedBatch> scope_;
};

void StartTrace(size_t capacity) {
  if (capacity == 0 || capacity > kMaxTraceSpans) {
    RaiseIfError(InvalidArgument("capacity of a trace is ", capacity, "; it must be 1 to ",
                                 kMaxTraceSpans, " spans"));
  }
  // It allocates: hundreds of megabytes for the largest capacity.
  WithoutGil([&] { TraceBuffer::Global().Start(capacity); });
}

// Of spans with a batch, those of every `one_in`-th; 0: all spans.
py::tuple StopTrace(uint64_t one_in) {
  const auto recording = WithoutGil([] { return TraceBuffer::Global().Stop(); });
  py::list spans;
  for (const TraceSpan& span : recording.spans) {
    const bool no_batch = span.batch_id == TraceSpan::kNoBatch;
    if (one_in != 0 && (no_batch || span.batch_id % one_in != 0)) continue;
    const py::object batch_id = no_batch ? py::object(py::none()) : py::int_(span.batch_id);
    spans.append(py::make_tuple(span.name.data(), span.begin_ns, span.end_ns, span.reference,
                                batch_id, span.thread_id));
  }
  return py::make_tuple(spans, recording.num_dropped);
}

// By kind: a flag is True or False in a status, and 0 or 1 for Prometheus.
py::object ValueOf(const Metric& metric) {
  if (metric.is_ratio) return py::float_(metric.ratio);
  if (metric.info.kind == MetricKind::kFlag) return py::bool_(metric.value != 0);
  return py::int_(metric.value);
}

}  // namespace

py::tuple SnapshotToTuple(const DurationStats::Snapshot& snapshot) {
  py::list counts;
  for (const uint64_t count : snapshot.counts) counts.append(count);
  return py::make_tuple(counts, static_cast<double>(snapshot.sum_ns) * kSecondsPerNs,
                        static_cast<double>(snapshot.last_ns) * kSecondsPerNs);
}

py::dict DurationsToDict(std::span<const DurationStats* const> durations) {
  py::dict dict;
  for (const DurationStats* one : durations) {
    dict[py::str(one->name())] = SnapshotToTuple(one->snapshot());
  }
  return dict;
}

py::dict MetricsToDict(const Metrics& metrics) {
  py::dict dict;
  for (const Metric& metric : metrics) dict[metric.info.key] = ValueOf(metric);
  return dict;
}

py::list MetricsToList(const Metrics& metrics) {
  py::list list;
  for (const Metric& metric : metrics) {
    // In stats() alone.
    if (metric.info.name == nullptr) continue;
    const bool is_counter = metric.info.kind == MetricKind::kCounter;
    list.append(py::make_tuple(metric.info.name, is_counter, metric.info.help, ValueOf(metric)));
  }
  return list;
}

void BindMetrics(py::module_& module) {
  module.attr("DURATION_BOUNDS_S") = BoundsInSeconds();
  py::class_<DurationStats>(module, "DurationStats")
      .def(py::init<std::string>(), py::arg("name"))
      .def("record", &Record, py::arg("begin_ns"), py::arg("end_ns"), py::arg("reference") = 0,
           py::arg("batch_id") = TraceSpan::kNoBatch)
      .def("snapshot", [](const DurationStats& self) { return SnapshotToTuple(self.snapshot()); })
      .def_property_readonly("name", &DurationStats::name);
  py::class_<BatchScope>(module, "TracedBatch")
      .def(py::init<uint64_t>(), py::arg("batch_id"))
      .def("__enter__", &BatchScope::Enter)
      .def("__exit__", &BatchScope::Exit);
  module.def("enable_durations", &DurationStats::Enable, py::arg("enabled"));
  module.def("start_trace", &StartTrace, py::arg("capacity"));
  module.def("stop_trace", &StopTrace, py::arg("one_in") = 0);
}

}  // namespace persia::bindings

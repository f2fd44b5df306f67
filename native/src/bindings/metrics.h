// What the engine counts, as Python sees it: plain dicts, lists and tuples, made when asked for.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <span>
#include <vector>

#include "base/duration_stats.h"
#include "base/metrics.h"
#include "bindings/errors.h"

namespace persia::bindings {

// Python's time.monotonic_ns() and std::chrono::steady_clock are one clock (CLOCK_MONOTONIC), so
// spans of both can be recorded together.
inline DurationStats::TimePoint ToTime(uint64_t ns) {
  return DurationStats::TimePoint(std::chrono::nanoseconds(ns));
}

// {name: (count of each bucket, sum [s], last [s])}
pybind11::dict DurationsToDict(std::span<const DurationStats* const> durations);
pybind11::tuple SnapshotToTuple(const DurationStats::Snapshot& snapshot);
pybind11::dict MetricsToDict(const Metrics& metrics);
pybind11::list MetricsToList(const Metrics& metrics);

// Defines `stats()`, which returns {key: value}, and `metrics()`, which returns what the exporter
// needs: (name, is_counter, help, value). `read` returns the Metrics of an object of the class, and
// runs without the GIL.
template <typename Class, typename Read>
void DefineMetrics(Class& bound, Read read) {
  using Self = typename Class::type;
  const auto values = [read](Self& self) { return WithoutGil([&] { return read(self); }); };
  bound.def("stats", [values](Self& self) { return MetricsToDict(values(self)); })
      .def("metrics", [values](Self& self) { return MetricsToList(values(self)); });
}

// Defines `name`(), a dict {label: name, key: value} for each of several objects, with the
// durations of its "calls" where it has some, and `metrics_name`(), (name, what metrics() returns)
// for each. `read` returns their SlotStats or ChannelStats.
template <typename Class, typename Read>
void DefineEach(Class& bound, const char* name, const char* metrics_name, Read read) {
  namespace py = pybind11;
  using Self = typename Class::type;
  const auto for_each = [read](Self& self, auto convert) {
    py::list list;
    for (const auto& one : WithoutGil([&] { return read(self); })) list.append(convert(one));
    return list;
  };
  bound
      .def(name,
           [for_each](Self& self) {
             return for_each(self, [](const auto& one) {
               py::dict dict = MetricsToDict(one.metrics);
               dict[one.kLabel] = one.name;
               if constexpr (requires { one.calls; }) dict["calls"] = SnapshotToTuple(one.calls);
               return dict;
             });
           })
      .def(metrics_name, [for_each](Self& self) {
        return for_each(self, [](const auto& one) {
          return py::make_tuple(one.name, MetricsToList(one.metrics));
        });
      });
}

}  // namespace persia::bindings

// What the engine counts, as Python sees it: plain dicts, lists and tuples, made when asked for.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

#include "base/duration_stats.h"
#include "base/metrics.h"
#include "bindings/errors.h"
#include "net/types.h"
#include "worker/slot_stats.h"

namespace persia::bindings {

// {name: (count of each bucket, sum [s], last [s])}
pybind11::dict DurationsToDict(std::span<const DurationStats* const> durations);
pybind11::list ChannelsToList(std::span<const net::ChannelStats> channels);
pybind11::list SlotsToList(std::span<const worker::SlotStats> slots);
pybind11::dict MetricsToDict(const Metrics& metrics);
pybind11::list MetricsToList(const Metrics& metrics);

// Defines `stats()`, which returns {key: value}, and `metrics()`, which returns what the exporter
// needs: (name, is_counter, help, value). `read` returns
// Metrics, or a StatusOr of them, of an object of the class, and runs without the GIL.
template <typename Class, typename Read>
void DefineMetrics(Class& bound, Read read) {
  using Self = typename Class::type;
  const auto values = [read](Self& self) {
    return ValueOrRaise(WithoutGil([&] { return StatusOr<Metrics>(read(self)); }));
  };
  bound.def("stats", [values](Self& self) { return MetricsToDict(values(self)); })
      .def("metrics", [values](Self& self) { return MetricsToList(values(self)); });
}

}  // namespace persia::bindings

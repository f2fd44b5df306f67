// What the engine counts, as Python sees it: plain dicts, lists and tuples, made when asked for.
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

#include "base/duration_stats.h"
#include "net/rpc_stats.h"
#include "worker/slot_stats.h"

namespace persia::bindings {

// {name: (count of each bucket, sum [s], last [s])}
pybind11::dict DurationsToDict(std::span<const DurationStats* const> durations);
pybind11::list ChannelsToList(std::span<const net::ChannelStats> channels);
pybind11::list SlotsToList(std::span<const worker::SlotStats> slots);
// Adds "rpc_num_requests" and so on.
void AddRpcStats(const net::ServerStats& stats, pybind11::dict* dict);

}  // namespace persia::bindings

// Settings of rows by name, as scripts and the embedding config give them.
//
// The constructors raise InvalidArgumentError, which names the setting, for unknown names, values
// that are no numbers and those out of their range.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/train_config.h"

namespace persia::bindings {

// `settings`: hyper-parameter -> number; those left out have the optimizer's defaults.
OptimizerConfig MakeOptimizer(const std::string& name, const pybind11::dict& settings);

// {"name": "uniform", "lower": ..., "upper": ...} and the like; the seed stays 0.
Initializer MakeInitializer(const pybind11::dict& settings);

// What a slot has of its own: {"optimizer": {"name": ..., ...}, "initializer": {...},
// "admit_probability": ..., "admit_after": ..., "weight_bound": ..., "time_to_live_sec": ...,
// "min_norm": ..., "capacity": ...}, each of them optional.
SlotRowConfig MakeSlotRowConfig(const pybind11::dict& settings);

}  // namespace persia::bindings

// Calls of the C interface that may wait.
#pragma once

#include <cstdint>
#include <functional>

#include "base/status.h"

#define API extern "C" __attribute__((visibility("default")))

namespace persia::simulation {

// Begins `run` on a fiber of the process; returns the number of the call, which sim_take_ended()
// tells once it has ended.
int64_t Begin(int process, std::function<StatusOr<int64_t>()> run);

inline StatusOr<int64_t> Done(const Status& status) {
  if (!status.ok()) return status;
  return int64_t{0};
}

}  // namespace persia::simulation

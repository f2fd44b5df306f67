// DivideWork: consecutive pieces of work shared out among threads in runs of about the same cost.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace persia::client {

// Pieces begin .. end.
struct WorkRun {
  size_t begin = 0;
  size_t end = 0;
};

// At most `num_runs` runs (one for each piece where those are fewer), none empty, which together
// are all pieces in their order. A run ends where its share of the cost of all comes nearest.
std::vector<WorkRun> DivideWork(std::span<const double> costs, size_t num_runs);

}  // namespace persia::client

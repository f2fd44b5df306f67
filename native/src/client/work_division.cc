#include "client/work_division.h"

#include <algorithm>
#include <numeric>

namespace persia::client {

std::vector<WorkRun> DivideWork(std::span<const double> costs, size_t num_runs) {
  num_runs = std::min(num_runs, costs.size());
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  std::vector<WorkRun> runs;
  size_t end = 0;
  double passed = 0.0;  // the cost of the pieces before `end`
  for (size_t run = 1; run <= num_runs; ++run) {
    const size_t begin = end;
    const size_t last_end = costs.size() - (num_runs - run);  // leaves a piece for each later run
    const double share = total * static_cast<double>(run) / static_cast<double>(num_runs);
    do {
      passed += costs[end++];
    } while (end < last_end && (run == num_runs || passed + costs[end] / 2 <= share));
    runs.push_back({begin, end});
  }
  return runs;
}

}  // namespace persia::client

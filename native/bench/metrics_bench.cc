// What measuring costs: one phase with measuring off, on, and traced, and one ID of those that are
// counted as distinct. benchmarks/observability_cost.py says what share of a step that is.
#include <benchmark/benchmark.h>

#include <vector>

#include "base/duration_stats.h"
#include "base/metrics.h"

namespace persia {
namespace {

void TimePhases(benchmark::State& state) {
  DurationStats stats("phase");
  for (auto _ : state) {
    const Timed timed(stats);
  }
}

void BM_PhaseOff(benchmark::State& state) {
  DurationStats::Enable(false);
  TimePhases(state);
  DurationStats::Enable(true);
}
BENCHMARK(BM_PhaseOff);

void BM_Phase(benchmark::State& state) { TimePhases(state); }
BENCHMARK(BM_Phase);

void BM_PhaseTraced(benchmark::State& state) {
  TraceBuffer::Global().Start(4'000'000);
  TimePhases(state);
  state.counters["dropped"] = static_cast<double>(TraceBuffer::Global().Stop().num_dropped);
}
BENCHMARK(BM_PhaseTraced)->Iterations(1'000'000);

// Items are IDs: time / items is what one costs in a batch that is counted, one of 32.
void BM_DistinctIds(benchmark::State& state) {
  Cardinality distinct;
  std::vector<uint64_t> ids(500);
  uint64_t next = 0;
  for (uint64_t& id : ids) id = next++ * 0x9e3779b97f4a7c15;
  for (auto _ : state) distinct.Add(ids);
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(ids.size()));
}
BENCHMARK(BM_DistinctIds);

}  // namespace
}  // namespace persia

// What the memory of this machine gives one thread and two: the limit of wide rows.
#include <benchmark/benchmark.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{256} << 20;  // of each thread; no cache holds it

std::vector<uint64_t> Filled() { return std::vector<uint64_t>(kBytes / sizeof(uint64_t), 1); }

void Report(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(kBytes));
}

void Read(benchmark::State& state) {
  const std::vector<uint64_t> from = Filled();
  for (auto _ : state) {
    benchmark::DoNotOptimize(std::accumulate(from.begin(), from.end(), uint64_t{0}));
  }
  Report(state);
}

void Write(benchmark::State& state) {
  std::vector<uint64_t> to = Filled();
  for (auto _ : state) {
    std::memset(to.data(), 3, kBytes);
    benchmark::ClobberMemory();
  }
  Report(state);
}

void Copy(benchmark::State& state) {
  const std::vector<uint64_t> from = Filled();
  std::vector<uint64_t> to = Filled();
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), kBytes);
    benchmark::ClobberMemory();
  }
  Report(state);
}

BENCHMARK(Read)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(Write)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(Copy)->Threads(1)->Threads(2)->UseRealTime();

}  // namespace

// Throughput of the store on one thread: distinct rows a second under skewed traffic, as a
// parameter server sees it after its callers have removed duplicates within each batch.
#include <benchmark/benchmark.h>

#include <cmath>
#include <memory>
#include <random>
#include <unordered_set>
#include <vector>

#include "base/hash.h"
#include "store/embedding_store.h"

namespace persia::store {
namespace {

constexpr size_t kIdsPerBatch = 106'496;  // 26 slots of 4096 samples
constexpr size_t kBatches = 24;

// Bounded Zipf(1.1) by inverting the integral of its density: rank 0 is the most frequent.
uint64_t ZipfRank(double uniform, double num_rows) {
  constexpr double kExponent = -0.1;  // 1 - 1.1
  const double end = std::pow(num_rows, kExponent);
  return static_cast<uint64_t>(std::pow(1 + uniform * (end - 1), 1 / kExponent)) - 1;
}

// Batches of distinct signs, hashed so that neither order nor place tells the rank.
const std::vector<std::vector<uint64_t>>& Batches(uint64_t num_rows) {
  static std::vector<std::vector<uint64_t>> batches;
  static uint64_t made_for = 0;
  if (made_for == num_rows) return batches;
  made_for = num_rows;
  batches.assign(kBatches, {});
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform;
  for (auto& batch : batches) {
    std::unordered_set<uint64_t> seen;
    for (size_t i = 0; i < kIdsPerBatch; ++i) {
      const uint64_t slot = random() % 26;
      const uint64_t rank = ZipfRank(uniform(random), static_cast<double>(num_rows) / 26);
      const uint64_t sign = SignHash(rank * 26 + slot);
      if (seen.insert(sign).second) batch.push_back(sign);
    }
  }
  return batches;
}

// All rows present, in order of rank, as a long run would have made them.
std::unique_ptr<EmbeddingStore> FilledStore(OptimizerKind kind, uint64_t num_rows, uint32_t dim) {
  auto store = EmbeddingStore::Create({.capacity = 1'000'000'000, .num_internal_shards = 16});
  TrainConfig config;
  config.optimizer.kind = kind;
  if (!store.value()->Configure(config).ok()) return nullptr;
  constexpr size_t kChunk = 50'000;
  std::vector<float> rows(kChunk * dim);
  std::vector<uint64_t> signs(kChunk);
  for (uint64_t begin = 0; begin < num_rows; begin += kChunk) {
    for (size_t i = 0; i < kChunk; ++i) signs[i] = SignHash(begin + i);
    const RowBlock block = {.dim = dim, .signs = signs};
    if (!store.value()->Lookup({&block, 1}, LookupMode::kTrain, rows.data()).ok()) return nullptr;
  }
  return std::move(store).value();
}

enum Mode : int64_t { kLookup, kInference, kUpdate, kBoth };

// Arguments: mode, optimizer kind, dim, rows in the store.
void StoreTraffic(benchmark::State& state) {
  const auto mode = static_cast<Mode>(state.range(0));
  const auto kind = static_cast<OptimizerKind>(state.range(1));
  const auto dim = static_cast<uint32_t>(state.range(2));
  const auto num_rows = static_cast<uint64_t>(state.range(3));
  auto store = FilledStore(kind, num_rows, dim);
  if (store == nullptr) return state.SkipWithError("the store could not be filled");
  const auto& batches = Batches(num_rows);
  std::vector<float> rows(kIdsPerBatch * dim);
  const std::vector<float> gradients(kIdsPerBatch * dim, 0.01f);
  const auto lookup_mode = mode == kInference ? LookupMode::kInference : LookupMode::kTrain;
  size_t next = 0;
  int64_t distinct = 0;
  bool ok = true;
  for (auto _ : state) {
    const RowBlock block = {.dim = dim, .signs = batches[next++ % kBatches]};
    if (mode != kUpdate) ok &= store->Lookup({&block, 1}, lookup_mode, rows.data()).ok();
    if (mode == kUpdate || mode == kBoth) ok &= store->Update({&block, 1}, gradients.data()).ok();
    distinct += static_cast<int64_t>(block.signs.size());
  }
  if (!ok) state.SkipWithError("a call failed");
  state.SetItemsProcessed(distinct);
  const StoreStats stats = store->stats();
  state.counters["bytes_per_row"] =
      static_cast<double>(stats.memory_bytes) / static_cast<double>(stats.num_rows);
}

BENCHMARK(StoreTraffic)
    ->ArgNames({"mode", "optimizer", "dim", "rows"})
    ->Args({kInference, 1, 16, 10'000'000})
    ->Args({kLookup, 1, 16, 10'000'000})
    ->Args({kUpdate, 1, 16, 10'000'000})
    ->Args({kBoth, 1, 16, 10'000'000})
    ->Args({kBoth, 2, 16, 10'000'000})
    ->Args({kBoth, 3, 16, 10'000'000})
    ->Args({kLookup, 1, 64, 5'000'000})
    ->Args({kUpdate, 1, 64, 5'000'000})
    ->Args({kBoth, 1, 64, 5'000'000})
    ->Unit(benchmark::kMillisecond)
    ->MinTime(1.0);

}  // namespace
}  // namespace persia::store

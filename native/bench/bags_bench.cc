// Throughput of EmbeddingBags: IDs a second through lookup, pooling, gradient sums and update.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bench/workload.h"
#include "client/embedding_bags.h"

namespace persia::client {
namespace {

constexpr size_t kBatchSize = 4096;
constexpr size_t kBatches = 16;

std::unique_ptr<EmbeddingBags> MakeBags(const std::vector<uint64_t>& vocabularies,
                                        OptimizerKind kind, uint32_t dim, uint32_t num_threads,
                                        store::RowDtype dtype, bool is_array) {
  EmbeddingBagsOptions options;
  for (uint32_t i = 0; i < vocabularies.size(); ++i) {
    options.slots.push_back({.name = "f" + std::to_string(i),
                             .dim = dim,
                             .group = i,
                             .num_array_ids = is_array ? vocabularies[i] : 0});
  }
  options.num_threads = num_threads;
  options.store.row_dtype = dtype;
  auto bags = EmbeddingBags::Create(std::move(options));
  TrainConfig config;
  config.optimizer.kind = kind;
  if (!bags.ok() || !bags.value()->Configure(config, false).ok()) return nullptr;
  return std::move(bags).value();
}

// All rows, in the order of first arrival, or of an array; nanoseconds a row, or nothing where one
// failed.
std::optional<double> Fill(EmbeddingBags& bags, const std::vector<uint64_t>& vocabularies,
                           bool is_array) {
  using Clock = std::chrono::steady_clock;
  Clock::duration time{};
  constexpr uint64_t kChunk = 1 << 16;
  for (size_t slot = 0; slot < vocabularies.size(); ++slot) {
    std::vector<uint64_t> ids = is_array ? std::vector<uint64_t>(vocabularies[slot])
                                         : bench::IdsByArrival(slot, vocabularies[slot]);
    if (is_array) std::iota(ids.begin(), ids.end(), 0);
    for (uint64_t begin = 0; begin < ids.size(); begin += kChunk) {
      const auto chunk = std::span(ids).subspan(begin, std::min(kChunk, ids.size() - begin));
      std::vector<int64_t> lengths(vocabularies.size(), 0);
      lengths[slot] = static_cast<int64_t>(chunk.size());
      const auto start = Clock::now();
      if (!bags.Lookup(chunk, lengths, store::LookupMode::kTrain).ok()) return std::nullopt;
      time += Clock::now() - start;
    }
  }
  return std::chrono::duration<double, std::nano>(time).count() /
         static_cast<double>(bags.stats().num_rows);
}

struct FilledBags {
  std::unique_ptr<EmbeddingBags> bags;
  double fill_ns = 0;  // a row
};

// Kept until another one is asked for: a benchmark is called several times until it knows how long
// to run, and filling takes longer than measuring. Null where something failed.
const FilledBags* Filled(const std::vector<uint64_t>& vocabularies, OptimizerKind kind,
                         uint32_t dim, uint32_t num_threads, store::RowDtype dtype, bool is_array) {
  using Key =
      std::tuple<std::vector<uint64_t>, OptimizerKind, uint32_t, uint32_t, store::RowDtype, bool>;
  static Key made_for;
  static FilledBags filled;
  const Key key = {vocabularies, kind, dim, num_threads, dtype, is_array};
  if (filled.bags != nullptr && key == made_for) return &filled;
  filled.bags.reset();  // one table at a time
  filled.bags = MakeBags(vocabularies, kind, dim, num_threads, dtype, is_array);
  if (filled.bags == nullptr) return nullptr;
  const auto fill_ns = Fill(*filled.bags, vocabularies, is_array);
  if (!fill_ns.has_value()) return nullptr;
  filled.fill_ns = *fill_ns;
  made_for = key;
  return &filled;
}

enum Mode : int64_t { kTrain, kLookup };

// Arguments: mode, optimizer kind, dim, most rows a slot, mean IDs a bag (0: exactly one), threads,
// row dtype (0: float32, 1: float16, 2: bfloat16), whether rows are in arrays by ID.
void BagsTraffic(benchmark::State& state) {
  const auto mode = static_cast<Mode>(state.range(0));
  const auto kind = static_cast<OptimizerKind>(state.range(1));
  const auto dim = static_cast<uint32_t>(state.range(2));
  std::vector<uint64_t> vocabularies(bench::kCriteoKaggle.begin(), bench::kCriteoKaggle.end());
  const auto mean_ids = static_cast<double>(state.range(4));
  const bool is_array = state.range(7) != 0;
  if (mean_ids > 0) {
    std::sort(vocabularies.begin(), vocabularies.end(), std::greater<>());
    vocabularies.resize(8);
  }
  for (uint64_t& size : vocabularies) size = std::min<uint64_t>(size, state.range(3));
  const FilledBags* filled = Filled(vocabularies, kind, dim, static_cast<uint32_t>(state.range(5)),
                                    static_cast<store::RowDtype>(state.range(6)), is_array);
  if (filled == nullptr) return state.SkipWithError("cannot be filled");
  EmbeddingBags* bags = filled->bags.get();
  const auto batches =
      bench::MakeBatches(vocabularies, kBatchSize, kBatches, mean_ids, 1, is_array);
  const std::vector<float> gradients(kBatchSize * bags->num_columns(), 1e-3f);
  const auto lookup_mode =
      mode == kTrain ? store::LookupMode::kTrain : store::LookupMode::kInference;
  size_t next = 0;
  int64_t num_ids = 0;
  for (auto _ : state) {
    const bench::Batch& batch = batches[next++ % kBatches];
    auto pooled = bags->Lookup(batch.values, batch.lengths, lookup_mode);
    if (!pooled.ok()) return state.SkipWithError("a lookup failed");
    if (mode == kTrain && !bags->Update(*pooled->batch, gradients).ok()) {
      return state.SkipWithError("an update failed");
    }
    num_ids += static_cast<int64_t>(batch.values.size());
  }
  state.SetItemsProcessed(num_ids);
  const store::StoreStats stats = bags->stats();
  state.counters["fill_ns_per_row"] = filled->fill_ns;
  state.counters["bytes_per_row"] =
      static_cast<double>(stats.memory_bytes) / static_cast<double>(stats.num_rows);
}

constexpr int64_t kAdagrad = 1, kRowwise = 2, kAdam = 3;

BENCHMARK(BagsTraffic)
    ->ArgNames({"mode", "optimizer", "dim", "rows", "ids", "threads", "dtype", "array"})
    ->Args({kTrain, kAdagrad, 16, 1'000'000, 0, 1, 0, 0})
    ->Args({kTrain, kRowwise, 16, 1'000'000, 0, 1, 0, 0})
    ->Args({kTrain, kAdam, 16, 1'000'000, 0, 1, 0, 0})
    ->Args({kLookup, kAdagrad, 16, 1'000'000, 0, 1, 0, 0})
    ->Args({kTrain, kAdagrad, 16, 1'000'000, 0, 2, 0, 0})
    ->Args({kTrain, kAdagrad, 64, 1'000'000, 0, 1, 0, 0})
    ->Args({kTrain, kRowwise, 64, 1'000'000, 0, 1, 0, 0})
    ->Args({kTrain, kAdagrad, 128, 500'000, 0, 1, 0, 0})
    ->Args({kTrain, kRowwise, 128, 500'000, 0, 1, 0, 0})
    ->Args({kTrain, kAdagrad, 16, 1'000'000, 20, 1, 0, 0})
    ->Args({kTrain, kAdagrad, 64, 500'000, 20, 1, 0, 0})
    ->ArgsProduct({{kTrain, kLookup}, {kRowwise}, {16}, {10'000'000}, {20}, {1}, {0}, {0}})
    ->ArgsProduct(
        {{kTrain, kLookup}, {kRowwise}, {16, 64, 128}, {500'000}, {0}, {1}, {0, 1, 2}, {0}})
    ->ArgsProduct({{kTrain, kLookup}, {kRowwise}, {16, 64}, {500'000}, {20}, {1}, {0, 1, 2}, {0}})
    ->ArgsProduct({{kTrain, kLookup}, {kRowwise}, {16}, {50'000'000}, {0, 20}, {1}, {0}, {1}})
    ->ArgsProduct({{kTrain, kLookup}, {kRowwise}, {64}, {2'000'000}, {0, 20}, {1}, {0}, {0, 1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace persia::client

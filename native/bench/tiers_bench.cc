// Lookups and updates of a store over a pool (store/store_tier.h) beside those of simpler ones.
//
//   tiers_bench DIRECTORY [EXPONENT] [CACHE_SHARE] [ROWS] [ROUNDS] [file|pmem]
//
// Below DIRECTORY each store makes a pool of its own, which goes at the end. All get the same
// batches, of IDs under a Zipf law with EXPONENT, on the same threads: each thread looks its batch
// up, then updates it. They take turns, and a turn ends when the store has done what it left for
// later. "announced" was told the thread's next batch while it had the one before, as
// embedding workers do. Ratios are medians of those of the turns, with the least and the largest.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "bench/simple_tiers.h"
#include "bench/workload.h"
#include "store/embedding_store.h"

namespace persia::bench {
namespace {

using store::EmbeddingStore;
using store::RowBlock;

constexpr uint32_t kDim = 16;
constexpr size_t kSlots = 26;
constexpr size_t kSamples = 2048;
constexpr size_t kBatchesATurn = 60;  // of all threads together

using Signs = std::vector<uint64_t>;

struct Options {
  std::string directory;
  double exponent = 1.3;
  double cache_share = 0.1;
  uint64_t rows = 1'000'000;
  size_t rounds = 7;
  pool::PoolKind kind = pool::PoolKind::kPmem;

  uint64_t cache_rows() const { return static_cast<uint64_t>(double(rows) * cache_share); }
  pool::PoolOptions PoolOptions() const {
    return {.kind = kind, .size_bytes = (rows + (1 << 20)) * 2 * pool::CellBytes(2 * kDim)};
  }
};

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "tiers_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

TrainConfig Config() {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  return config;
}

class Contestant {
 public:
  explicit Contestant(std::string name) : name_(std::move(name)) {}
  virtual ~Contestant() = default;
  virtual void Lookup(const Signs& signs, float* rows) = 0;
  virtual void Update(const Signs& signs, const float* gradients) = 0;
  virtual void Announce(const Signs&) {}
  virtual void Finish() {}
  // Of the lookups so far: rows that came from the pool, of how many; 0: not known.
  virtual std::pair<uint64_t, uint64_t> Misses() const { return {0, 0}; }
  const std::string& name() const { return name_; }

 private:
  const std::string name_;
};

class Ours final : public Contestant {
 public:
  // Without a directory: in memory.
  Ours(const char* name, const Options& options, const std::string& directory, bool announces)
      : Contestant(name), announces_(announces), cache_rows_(options.cache_rows()) {
    const EmbeddingStore::Options store_options{.capacity = 1'000'000'000};
    auto store = directory.empty()
                     ? EmbeddingStore::Create(store_options)
                     : EmbeddingStore::Open(store_options, {.directory = directory,
                                                            .pool = options.PoolOptions(),
                                                            .cache_rows = cache_rows_});
    Check(store.status());
    store_ = std::move(*store);
    Check(store_->Configure(Config()));
  }
  void Lookup(const Signs& signs, float* rows) override {
    const RowBlock block = {.dim = kDim, .signs = signs};
    Check(store_->Lookup({&block, 1}, store::LookupMode::kTrain, rows));
  }
  void Update(const Signs& signs, const float* gradients) override {
    const RowBlock block = {.dim = kDim, .signs = signs};
    Check(store_->Update({&block, 1}, gradients));
  }
  void Announce(const Signs& signs) override {
    if (announces_) store_->tier().Prefetch(signs);
  }
  // Until the cache is as large as it may be after a call.
  void Finish() override {
    const uint64_t limit = cache_rows_ + cache_rows_ / 32;
    while (store_->tier().stats() && store_->tier().stats()->num_hot > limit) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  std::pair<uint64_t, uint64_t> Misses() const override {
    const auto stats = store_->tier().stats();
    if (!stats) return {0, 0};
    return {stats->num_misses + stats->num_prefetched, stats->num_hits + stats->num_misses};
  }

 private:
  const bool announces_;
  const uint64_t cache_rows_;
  std::unique_ptr<EmbeddingStore> store_;
};

template <typename Tier>
class Simple final : public Contestant {
 public:
  template <typename... Sizes>
  Simple(const char* name, const Options& options, const std::string& directory, Sizes... sizes)
      : Contestant(name), rules_(Config()) {
    auto pool = pool::RowPool::Create(directory, options.PoolOptions());
    Check(pool.status());
    pool_ = std::move(*pool);
    tier_ = std::make_unique<Tier>(*pool_, rules_, kDim, options.rows, sizes...);
  }
  void Lookup(const Signs& signs, float* rows) override { tier_->Lookup(signs, rows); }
  void Update(const Signs& signs, const float* gradients) override {
    tier_->Update(signs, gradients);
  }

 private:
  const store::RowPolicy rules_;
  std::unique_ptr<pool::RowPool> pool_;
  std::unique_ptr<Tier> tier_;
};

// Distinct signs, as of a server whose callers have removed duplicates.
Signs MakeBatch(const Options& options, std::mt19937_64& random) {
  std::uniform_real_distribution<double> uniform;
  std::unordered_set<uint64_t> seen;
  Signs signs;
  for (size_t slot = 0; slot < kSlots; ++slot) {
    for (size_t sample = 0; sample < kSamples; ++sample) {
      const uint64_t rank = ZipfRank(uniform(random), options.rows / kSlots, options.exponent);
      const uint64_t sign = IdOf(slot, rank);
      if (seen.insert(sign).second) signs.push_back(sign);
    }
  }
  return signs;
}

std::vector<Signs> EveryRow(const Options& options) {
  std::vector<Signs> batches;
  for (size_t slot = 0; slot < kSlots; ++slot) {
    for (uint64_t rank = 0; rank < options.rows / kSlots; ++rank) {
      if (batches.empty() || batches.back().size() == kSlots * kSamples) batches.emplace_back();
      batches.back().push_back(IdOf(slot, rank));
    }
  }
  return batches;
}

// Each of the threads has every so many'th batch. Seconds.
double Train(Contestant& contestant, const std::vector<Signs>& batches, size_t num_threads) {
  const auto begin = std::chrono::steady_clock::now();
  const auto train = [&](size_t first) {
    std::vector<float> rows(kSlots * kSamples * kDim);
    const std::vector<float> gradients(rows.size(), 0.01f);
    for (size_t i = first; i < batches.size(); i += num_threads) {
      if (i + num_threads < batches.size()) contestant.Announce(batches[i + num_threads]);
      contestant.Lookup(batches[i], rows.data());
      contestant.Update(batches[i], gradients.data());
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < num_threads; ++i) threads.emplace_back(train, i);
  train(0);
  for (std::thread& thread : threads) thread.join();
  contestant.Finish();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Compare(std::vector<std::unique_ptr<Contestant>>& contestants, const Options& options,
             size_t num_threads, std::mt19937_64& random) {
  std::vector<std::vector<double>> seconds(contestants.size());
  const auto misses = contestants[0]->Misses();
  uint64_t num_rows = 0;
  for (size_t round = 0; round < options.rounds; ++round) {
    std::vector<Signs> batches(kBatchesATurn);
    for (Signs& batch : batches) num_rows += (batch = MakeBatch(options, random)).size();
    for (size_t i = 0; i < contestants.size(); ++i) {
      const size_t turn = (round + i) % contestants.size();
      seconds[turn].push_back(Train(*contestants[turn], batches, num_threads));
    }
  }
  const auto later = contestants[0]->Misses();
  const double miss_share =
      double(later.first - misses.first) / double(later.second - misses.second);
  const double num_ids = double(kSlots * kSamples * kBatchesATurn * options.rounds);
  std::printf(
      "%zu threads: %.1f %% of the distinct rows of a batch were not cached, %.1f %% of its IDs\n",
      num_threads, 100 * miss_share, 100 * miss_share * double(num_rows) / num_ids);
  for (size_t i = 0; i < contestants.size(); ++i) {
    std::vector<double> ratios;
    for (size_t round = 0; round < options.rounds; ++round) {
      ratios.push_back(seconds[i][round] / seconds[0][round]);
    }
    const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
    std::printf("  %-18s %7.2f M rows/s; takes %.2f times as long as ours (%.2f to %.2f)\n",
                contestants[i]->name().c_str(),
                double(num_rows) / double(options.rounds) / Median(seconds[i]) / 1e6,
                Median(ratios), *least, *most);
  }
}

void Run(const Options& options) {
  const auto folder = [&](const char* name) {
    const std::string path = options.directory + "/" + name;
    std::filesystem::create_directory(path);
    return path;
  };
  std::vector<std::unique_ptr<Contestant>> contestants;
  contestants.push_back(std::make_unique<Ours>("ours", options, folder("ours"), false));
  contestants.push_back(
      std::make_unique<Ours>("ours, announced", options, folder("announced"), true));
  contestants.push_back(std::make_unique<Simple<TextbookCache>>(
      "textbook cache", options, folder("textbook"), options.cache_rows()));
  contestants.push_back(
      std::make_unique<Simple<StraightToTier>>("straight to tier", options, folder("straight")));
  contestants.push_back(std::make_unique<Ours>("all in memory", options, "", false));
  std::mt19937_64 random(1);
  std::vector<Signs> warm_up = EveryRow(options);
  // As many lookups again as the cache has rows, so that it has what the law brings.
  for (uint64_t count = 0; count < 2 * options.cache_rows(); count += warm_up.back().size()) {
    warm_up.push_back(MakeBatch(options, random));
  }
  for (auto& contestant : contestants) Train(*contestant, warm_up, 1);
  for (const size_t num_threads : {1, 2}) Compare(contestants, options, num_threads, random);
  contestants.clear();
  for (const char* name : {"ours", "announced", "textbook", "straight"}) {
    std::filesystem::remove_all(options.directory + "/" + name);
  }
}

}  // namespace
}  // namespace persia::bench

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: tiers_bench DIRECTORY [EXPONENT] [CACHE_SHARE] [ROWS] [ROUNDS] "
                 "[file|pmem]\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  persia::bench::Options options{.directory = argv[1]};
  if (argc > 2) options.exponent = std::atof(argv[2]);
  if (argc > 3) options.cache_share = std::atof(argv[3]);
  if (argc > 4) options.rows = std::strtoull(argv[4], nullptr, 10);
  if (argc > 5) options.rounds = std::strtoull(argv[5], nullptr, 10);
  if (argc > 6 && std::string(argv[6]) == "file") options.kind = persia::pool::PoolKind::kFile;
  persia::bench::Run(options);
}

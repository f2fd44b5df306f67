// Dumping and loading a store: bytes a second, bytes a row, and what training loses meanwhile.
//
//   checkpoint_bench [NUM_ROWS [DIM [ROUNDS [NICE [MAX_PROCESSORS]]]]]
//
// Rows are Adagrad's after some updates with random gradients. Training is one thread with batches
// of 10,000 rows; its mean time a batch over whole dumps stands against as many batches without
// one; MAX_PROCESSORS as in dump_throttle.h, 0 for no limit. The dump of another store, which is
// not trained and never throttled, takes as much of the machine, and nothing of this one's.
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "checkpoint/loader.h"
#include "checkpoint/snapshot.h"
#include "store/embedding_store.h"

namespace persia::bench {
namespace {

using checkpoint::Loader;
using checkpoint::Snapshot;
using store::EmbeddingStore;
using store::LookupMode;
using store::RowBlock;

constexpr size_t kBatchRows = 10'000;
constexpr int kDefaultNice = 10;  // persia/checkpoint/server_job.py
constexpr EmbeddingStore::Options kOptions{.capacity = 1'000'000'000, .num_internal_shards = 16};

// Both of the calling thread. On a machine that has other work, the second is the one to compare.
struct Times {
  double wall = Now(CLOCK_MONOTONIC);
  double cpu = Now(CLOCK_THREAD_CPUTIME_ID);

  static double Now(clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  Times Passed() const {
    const Times now;
    return {now.wall - wall, now.cpu - cpu};
  }
};

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

TrainConfig Config() {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  config.optimizer.initial_accumulator_value = 0.1f;
  return config;
}

std::unique_ptr<EmbeddingStore> MakeStore() {
  auto store = EmbeddingStore::Create(kOptions);
  Check(store.status());
  return std::move(store).value();
}

// One trainer: a lookup and an update of random rows.
class Trainer {
 public:
  Trainer(EmbeddingStore& store, uint64_t num_rows, uint32_t dim)
      : store_(store), num_rows_(num_rows), dim_(dim), rows_(kBatchRows * dim) {
    std::normal_distribution<float> normal(0.0f, 0.01f);
    for (size_t i = 0; i < rows_.size() + 1000; ++i) gradients_.push_back(normal(random_));
  }

  void Fill() {
    std::vector<uint64_t> signs(kBatchRows);
    for (uint64_t begin = 0; begin < num_rows_; begin += kBatchRows) {
      for (size_t i = 0; i < kBatchRows; ++i) signs[i] = SignHash(begin + i);
      for (int i = 0; i < 3; ++i) Train(signs);
    }
  }
  void TrainRandomBatch() {
    std::vector<uint64_t> signs(kBatchRows);
    // Distinct: a stride through all rows from somewhere.
    const uint64_t begin = random_(), stride = num_rows_ / kBatchRows;
    for (size_t i = 0; i < kBatchRows; ++i) signs[i] = SignHash((begin + i * stride) % num_rows_);
    Train(signs);
  }

 private:
  void Train(const std::vector<uint64_t>& signs) {
    const RowBlock block = {.dim = dim_, .signs = signs};
    Check(store_.Lookup({&block, 1}, LookupMode::kTrain, rows_.data()));
    Check(store_.Update({&block, 1}, gradients_.data() + random_() % 1000));
  }

  EmbeddingStore& store_;
  const uint64_t num_rows_;
  const uint32_t dim_;
  std::mt19937_64 random_{1};
  std::vector<float> rows_, gradients_;
};

using Bytes = std::vector<std::byte>;

// Reads a whole dump, at that priority; the files are kept where `files` is given.
size_t Dump(EmbeddingStore& store, int nice, double max_processors, std::vector<Bytes>* files) {
  auto snapshot = Snapshot::Begin(store, {.max_processors = max_processors});
  Check(snapshot.status());
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), nice);
  size_t size = 0;
  Bytes chunk;
  for (bool more = true; more;) {
    more = false;
    Check(snapshot.value()->part(0).value()->Read(4 << 20, [&](size_t count) {
      more = true;
      size += count;
      chunk.resize(count);
      return chunk.data();
    }));
    if (files != nullptr && more) files->push_back(std::move(chunk));
  }
  return size;
}

void Report(const char* what, double row_gb, Times passed) {
  std::printf("%-8s %6.2f GB/s of rows, %6.2f a second of CPU\n", what, row_gb / passed.wall,
              row_gb / passed.cpu);
}

void MeasureLoad(const std::vector<Bytes>& pieces, double row_gb) {
  Bytes file;
  for (const Bytes& piece : pieces) file.insert(file.end(), piece.begin(), piece.end());
  auto place = checkpoint::DecodeTrailer(
      Bytes(file.end() - static_cast<ptrdiff_t>(checkpoint::kTrailerBytes), file.end()));
  Check(place.status());
  auto header = checkpoint::DecodeHeader(file);
  Check(header.status());
  const auto blocks =
      std::span(file).subspan(header->header_bytes, place->offset - header->header_bytes);
  const auto store = MakeStore();
  auto loader = Loader::Begin(*store, {.config = Config()});
  Check(loader.status());
  Times begin;
  Check(loader.value()->Verify(blocks).status());
  Report("verify", row_gb, begin.Passed());
  Check(loader.value()->Replace());
  begin = Times();
  Check(loader.value()->Add(blocks).status());
  loader.value()->Commit();
  Report("load", row_gb, begin.Passed());
}

struct BatchTimes {
  int num_batches = 0;
  Times sum{0, 0};

  void Measure(Trainer* trainer) {
    const Times begin;
    trainer->TrainRandomBatch();
    const Times passed = begin.Passed();
    sum.wall += passed.wall;
    sum.cpu += passed.cpu;
    ++num_batches;
  }
};

// Another thread dumps `dumped` once a round, at that priority; from the cut to the
// end every batch counts. As many, in turns, without a dump.
void MeasureTraining(EmbeddingStore& dumped, const char* name, Trainer* trainer, int rounds,
                     int nice, double max_processors) {
  BatchTimes alone, beside;
  for (int round = 0; round < rounds; ++round) {
    std::atomic<bool> has_ended = false;
    std::thread dumper([&] {
      Dump(dumped, nice, max_processors, nullptr);
      has_ended = true;
    });
    while (!has_ended) beside.Measure(trainer);
    dumper.join();
    while (alone.num_batches < beside.num_batches) alone.Measure(trainer);
  }
  std::printf(
      "a batch of %zu rows beside a dump of %s: %+.1f %% of time, %+.1f %% of CPU "
      "(%.2f ms without; %d batches a dump)\n",
      kBatchRows, name, (beside.sum.wall / alone.sum.wall - 1) * 100,
      (beside.sum.cpu / alone.sum.cpu - 1) * 100, alone.sum.wall / alone.num_batches * 1e3,
      beside.num_batches / rounds);
}

int Main(int argc, char** argv) {
  const uint64_t num_rows = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2'000'000;
  const auto dim = static_cast<uint32_t>(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 16);
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  const int nice = argc > 4 ? std::atoi(argv[4]) : kDefaultNice;
  const double max_processors = argc > 5 ? std::atof(argv[5]) : 0;
  const auto store = MakeStore();
  Check(store->Configure(Config()));
  Trainer trainer(*store, num_rows, dim);
  trainer.Fill();
  const double row_bytes = 12.0 + 8.0 * dim;  // sign, age, embedding, state
  const double row_gb = static_cast<double>(store->size()) * row_bytes * 1e-9;
  std::printf("%llu rows of dim %u, %.2f GB\n", static_cast<unsigned long long>(store->size()), dim,
              row_gb);
  std::vector<Bytes> pieces;
  const Times begin;
  const size_t size = Dump(*store, /*nice=*/0, /*max_processors=*/0, &pieces);
  Report("dump", row_gb, begin.Passed());
  std::printf("the file has %.3f of their size\n", static_cast<double>(size) * 1e-9 / row_gb);
  MeasureLoad(pieces, row_gb);
  const auto other = MakeStore();
  Check(other->Configure(Config()));
  Trainer(*other, num_rows, dim).Fill();
  MeasureTraining(*other, "another store", &trainer, rounds, nice, max_processors);
  MeasureTraining(*store, "its own store", &trainer, rounds, nice, max_processors);
  return 0;
}

}  // namespace
}  // namespace persia::bench

int main(int argc, char** argv) { return persia::bench::Main(argc, argv); }

// Two ways to divide a batch among threads: threads own signs, or shards have locks.
//
// Both find the rows of the same batch of distinct signs and step them once, with the same code
// (store/in_place_rows.h). "own": each thread takes its share of the slots, whose signs are its
// alone. "lock": signs are first sorted by shard, each thread its share of them; then it takes the
// lock of one shard after the other, beginning elsewhere than the others, and handles its signs of
// that shard. The two take turns; milliseconds a batch, medians of many.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "base/hash.h"
#include "base/thread_pool.h"
#include "bench/workload.h"
#include "store/in_place_rows.h"

namespace persia::store {
namespace {

constexpr uint32_t kDim = 16;
constexpr size_t kBlock = 128;  // rows located, then updated
constexpr uint32_t kShards = 16;

// A thread's part of a batch; see SignRows.
struct Part {
  std::vector<uint64_t> signs;
  std::vector<RowHandle> handles;
  std::vector<const float*> values;
  std::vector<uint32_t> shard_ends;  // "lock" alone: signs of shard s end here

  void Resize() {
    handles.resize(signs.size());
    values.resize(signs.size());
  }
  SignRows Rows(size_t begin, size_t end) {
    return {kDim, std::span(signs).subspan(begin, end - begin),
            std::span(handles).subspan(begin, end - begin),
            std::span(values).subspan(begin, end - begin)};
  }
};

void Find(const InPlaceRows& store, const SignRows& rows) {
  static const std::vector<float> zeros(kDim);
  std::vector<uint32_t> missing;
  store.Find(rows, zeros.data(), &missing);
}

void Update(InPlaceRows& store, Part& part, size_t begin, size_t end) {
  static const std::vector<float> gradient(kDim, 1e-3f);
  static const std::vector<const float*> gradients(kBlock, gradient.data());
  UpdateReport report;
  for (; begin < end; begin += kBlock) {
    const SignRows rows = part.Rows(begin, std::min(end, begin + kBlock));
    store.Locate(rows);
    store.Update(rows, std::span(gradients).first(rows.signs.size()), &report);
  }
}

// A counting sort, as of a store that is called with many signs at once.
void SortByShard(const std::vector<uint64_t>& signs, Part* sorted) {
  std::vector<uint32_t>& ends = sorted->shard_ends;
  ends.assign(kShards, 0);
  for (const uint64_t sign : signs) ++ends[ShardOfKey(SignKey(sign), kShards)];
  uint32_t sum = 0;
  for (uint32_t& end : ends) end = (sum += end) - end;  // where the shard begins
  sorted->signs.resize(signs.size());
  for (const uint64_t sign : signs) {
    sorted->signs[ends[ShardOfKey(SignKey(sign), kShards)]++] = sign;
  }
  sorted->Resize();
}

template <typename Body>
void ForEachShardLocked(std::vector<std::mutex>& mutexes, size_t thread, size_t num_threads,
                        const Part& part, Body body) {
  const auto first = static_cast<uint32_t>(thread * kShards / num_threads);
  for (uint32_t i = 0; i < kShards; ++i) {
    const uint32_t shard = (first + i) % kShards;
    const std::lock_guard lock(mutexes[shard]);
    body(shard == 0 ? 0 : part.shard_ends[shard - 1], part.shard_ends[shard]);
  }
}

// The distinct signs of each thread's slots, of one batch.
std::vector<std::vector<uint64_t>> SignsOfThreads(const bench::Batch& batch, size_t num_threads) {
  const size_t num_slots = bench::kCriteoKaggle.size();
  const size_t per_slot = batch.values.size() / num_slots;
  std::vector<std::vector<uint64_t>> signs(num_threads);
  for (size_t slot = 0; slot < num_slots; ++slot) {
    std::vector<uint64_t> of_slot(batch.values.begin() + slot * per_slot,
                                  batch.values.begin() + (slot + 1) * per_slot);
    std::sort(of_slot.begin(), of_slot.end());
    of_slot.erase(std::unique(of_slot.begin(), of_slot.end()), of_slot.end());
    auto& mine = signs[slot * num_threads / num_slots];
    mine.insert(mine.end(), of_slot.begin(), of_slot.end());
  }
  return signs;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Compare(size_t num_threads) {
  auto made = EmbeddingStore::Create({.capacity = 100'000'000, .num_internal_shards = kShards});
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  if (!made.ok() || !made.value()->Configure(config).ok()) std::exit(1);
  EmbeddingStore& store = *made.value();
  std::vector<uint64_t> vocabularies(bench::kCriteoKaggle.begin(), bench::kCriteoKaggle.end());
  for (size_t slot = 0; slot < vocabularies.size(); ++slot) {
    vocabularies[slot] = std::min<uint64_t>(vocabularies[slot], 1'000'000);
    const auto ids = bench::IdsByArrival(slot, vocabularies[slot]);
    constexpr size_t kChunk = 1 << 16;
    std::vector<float> rows(kChunk * kDim);
    for (size_t begin = 0; begin < ids.size(); begin += kChunk) {
      const RowBlock block = {kDim,
                              std::span(ids).subspan(begin, std::min(kChunk, ids.size() - begin))};
      if (!store.Lookup({&block, 1}, LookupMode::kTrain, rows.data()).ok()) std::exit(1);
    }
  }
  std::vector<std::vector<std::vector<uint64_t>>> batches;
  for (const auto& batch : bench::MakeBatches(vocabularies, 4096, 16, 0)) {
    batches.push_back(SignsOfThreads(batch, num_threads));
  }
  ThreadPool threads(static_cast<uint32_t>(num_threads));
  std::vector<Part> parts(num_threads);
  std::vector<std::mutex> mutexes(kShards);
  std::vector<double> own_ms, lock_ms;
  const auto timed = [](auto body) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
        .count();
  };
  for (size_t round = 0; round < 40 * batches.size(); ++round) {
    const auto& signs = batches[round % batches.size()];
    auto in_place = InPlaceRows::Begin(store, LookupMode::kTrain);
    if (!in_place.ok()) std::exit(1);
    const auto own = [&] {
      threads.For(num_threads, [&](size_t t) {
        parts[t].signs = signs[t];
        parts[t].Resize();
        Find(*in_place, parts[t].Rows(0, signs[t].size()));
      });
      threads.For(num_threads, [&](size_t t) { Update(*in_place, parts[t], 0, signs[t].size()); });
    };
    const auto lock = [&] {
      threads.For(num_threads, [&](size_t t) {
        SortByShard(signs[t], &parts[t]);
        ForEachShardLocked(mutexes, t, num_threads, parts[t], [&](size_t begin, size_t end) {
          Find(*in_place, parts[t].Rows(begin, end));
        });
      });
      threads.For(num_threads, [&](size_t t) {
        ForEachShardLocked(mutexes, t, num_threads, parts[t], [&](size_t begin, size_t end) {
          Update(*in_place, parts[t], begin, end);
        });
      });
    };
    // In turns, and in the next cycle the other way round, so that each gets all batches.
    if ((round + round / batches.size()) % 2 == 0) {
      own_ms.push_back(timed(own));
    } else {
      lock_ms.push_back(timed(lock));
    }
  }
  const double own = Median(own_ms), lock = Median(lock_ms);
  std::printf("%zu threads: own %.3f ms, lock %.3f ms, lock / own %.2f\n", num_threads, own, lock,
              lock / own);
}

}  // namespace
}  // namespace persia::store

int main() {
  for (const size_t num_threads : {1, 2}) persia::store::Compare(num_threads);
}

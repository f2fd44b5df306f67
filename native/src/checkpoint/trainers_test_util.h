// Stores that are trained at random by several threads, for the tests of what is read meanwhile.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "checkpoint/checkpoint_test_util.h"
#include "store/in_place_rows.h"

namespace persia::checkpoint {

inline std::vector<float> Gradients(size_t count, float value) {
  return std::vector<float>(count, value);
}

// Random training by several threads, at times kept out of the store so that a first snapshot can
// say what the second, read while they train, must have.
class Trainers {
 public:
  using Train = void (*)(store::EmbeddingStore&, std::mt19937_64&);

  Trainers(store::EmbeddingStore& store, Train train, uint32_t num_threads) {
    for (uint32_t i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this, &store, train, i] {
        std::mt19937_64 random(i);
        while (!stops_.load()) {
          while (holds_.load() && !stops_.load()) std::this_thread::yield();
          const std::shared_lock lock(outside_);
          train(store, random);
          ++num_steps_;
        }
      });
    }
  }
  ~Trainers() {
    stops_ = true;
    for (auto& thread : threads_) thread.join();
  }

  template <typename Function>
  auto WhileTheyWait(Function function) {
    holds_ = true;
    const std::unique_lock lock(outside_);
    auto result = function();
    holds_ = false;
    return result;
  }
  void WaitForSteps(uint64_t count) const {
    const uint64_t end = num_steps_ + count;
    while (num_steps_ < end) std::this_thread::yield();
  }

 private:
  std::atomic<bool> stops_ = false, holds_ = false;
  std::atomic<uint64_t> num_steps_ = 0;
  std::shared_mutex outside_;
  std::vector<std::thread> threads_;
};

inline std::vector<uint64_t> RandomSigns(std::mt19937_64& random, uint64_t num_signs) {
  std::vector<uint64_t> signs(1 + random() % 200);
  for (uint64_t& sign : signs) sign = random() % num_signs;
  std::sort(signs.begin(), signs.end());
  signs.erase(std::unique(signs.begin(), signs.end()), signs.end());
  return signs;
}

#ifdef PERSIA_SANITIZED
inline constexpr uint64_t kFewer = 4;
#else
inline constexpr uint64_t kFewer = 1;
#endif
// More signs than the store has room for, at any scale: rows are evicted all the time.
inline constexpr uint64_t kNumSigns = 20'000 / kFewer;
inline constexpr store::EmbeddingStore::Options kSmallStore{.capacity = 8000 / kFewer,
                                                            .num_internal_shards = 4};

inline void TrainByCalls(store::EmbeddingStore& store, std::mt19937_64& random) {
  const auto signs = RandomSigns(random, kNumSigns);
  const uint32_t dim = random() % 8 == 0 ? 4 : 8;
  const uint64_t choice = random() % 100;
  if (choice < 50) {
    store::Lookup(store, signs, dim);
  } else if (choice < 90) {
    store::Update(store, signs, dim, Gradients(signs.size() * dim, 0.25f));
  } else if (choice < 99) {
    EXPECT_TRUE(store::SetRows(store, signs, dim, Gradients(signs.size() * dim, 2.0f)).ok());
  } else if (random() % 10 == 0 && !store.tier().stats()) {
    store.Clear();  // what a snapshot has not read yet stays, but for rows in a pool
  }
}

// A batch is updated in a step of its own, so that cuts fall between its lookup and its update.
struct InPlaceBatch {
  std::vector<uint64_t> signs, removals;
  std::vector<store::RowHandle> handles;
  std::vector<const float*> values;
  uint32_t dim = 0;

  store::SignRows rows() { return {dim, signs, handles, values}; }
};

inline void LookUpInPlace(store::EmbeddingStore& store, InPlaceBatch* batch) {
  static const std::vector<float> zeros(8);
  const store::SignRows rows = batch->rows();
  auto in_place = store::InPlaceRows::Begin(store, store::LookupMode::kTrain);
  ASSERT_TRUE(in_place.ok());
  std::vector<uint32_t> missing;
  in_place->Find(rows, zeros.data(), &missing);
  for (uint32_t shard = 0; shard < in_place->num_shards(); ++shard) {
    std::vector<store::MissingRow> of_shard;
    for (uint32_t i : missing) {
      if (in_place->ShardOf({&rows, i}) == shard) of_shard.push_back({&rows, i});
    }
    store::LookupReport report;
    ASSERT_TRUE(in_place->Insert(shard, of_shard, &report).ok());
  }
  batch->removals = in_place->Removals();
}

inline void TrainInPlace(store::EmbeddingStore& store, std::mt19937_64& random) {
  thread_local InPlaceBatch batch;
  if (batch.signs.empty()) {
    batch.signs = RandomSigns(random, kNumSigns);
    batch.dim = random() % 8 == 0 ? 4 : 8;
    batch.handles.resize(batch.signs.size());
    batch.values.resize(batch.signs.size());
    return LookUpInPlace(store, &batch);
  }
  const std::vector<float> gradient(batch.dim, 0.25f);
  auto in_place = store::InPlaceRows::BeginUpdate(store, batch.removals);
  in_place.Locate(batch.rows());
  const std::vector<const float*> gradients(batch.signs.size(), gradient.data());
  store::UpdateReport report;
  in_place.Update(batch.rows(), gradients, &report);
  batch.signs.clear();
}

// Several readers, one a part.
inline std::vector<Bytes> ReadAtOnce(Snapshot& snapshot) {
  std::vector<Bytes> files(snapshot.num_parts());
  std::vector<std::thread> readers;
  for (uint32_t i = 0; i < snapshot.num_parts(); ++i) {
    readers.emplace_back([&, i] {
      const Status status = ReadAll(*snapshot.part(i).value(), &files[i]);
      EXPECT_TRUE(status.ok()) << status.ToString();
    });
  }
  for (auto& reader : readers) reader.join();
  return files;
}

}  // namespace persia::checkpoint

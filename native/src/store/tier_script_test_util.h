// A training job that is a function of its batch numbers, for stores whose rows are compared with
// those of another one that ran it.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "store/store_snapshot.h"
#include "store/store_test_util.h"

namespace persia::store {

class Script {
 public:
  static constexpr uint32_t kDim = 3;
  static constexpr EmbeddingStore::Options kOptions = {.capacity = 301, .num_internal_shards = 3};
  static constexpr uint64_t kCacheRows = 45;       // a batch has fewer
  static constexpr uint64_t kCounter = 1'000'000;  // the sign of a row that counts batches

  static TrainConfig Config() {
    TrainConfig config;
    config.optimizer.kind = OptimizerKind::kAdam;
    config.optimizer.lr = 0.1f;
    return config;
  }
  static std::unique_ptr<EmbeddingStore> InMemory() {
    auto store = EmbeddingStore::Create(kOptions);
    EXPECT_TRUE(store.ok() && (*store)->Configure(Config()).ok());
    return std::move(*store);
  }

  // Small signs come often.
  static std::vector<uint64_t> Signs(uint64_t batch) {
    std::mt19937_64 random(batch);
    std::set<uint64_t> signs;
    for (int i = 0; i < 24; ++i) signs.insert(random() % (random() % 2 == 0 ? 60 : 600));
    return {signs.begin(), signs.end()};
  }
  static Status Train(EmbeddingStore& store, uint64_t batch) {
    const std::vector<uint64_t> signs = Signs(batch);
    std::vector<float> rows(signs.size() * kDim), gradients(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      gradients[i] = static_cast<float>((batch * 7 + signs[i / kDim] + i) % 11) * 0.1f - 0.5f;
    }
    const RowBlock block = {.dim = kDim, .signs = signs};
    PERSIA_RETURN_IF_ERROR(store.Lookup({&block, 1}, LookupMode::kTrain, rows.data()));
    PERSIA_RETURN_IF_ERROR(store.Update({&block, 1}, gradients.data()));
    return SetRows(store, {kCounter}, 1, {static_cast<float>(batch)});
  }
  // How many batches the store has seen.
  static uint64_t BatchOf(EmbeddingStore& store) {
    return static_cast<uint64_t>(Peek(store, {kCounter}, 1)[0]);
  }

  struct Row {
    std::vector<float> values;  // with their state
    uint32_t scalar;
    bool operator==(const Row&) const = default;
  };
  static std::map<uint64_t, Row> Rows(EmbeddingStore& store) {
    auto snapshot = StoreSnapshot::Begin(store, {});
    EXPECT_TRUE(snapshot.ok()) << snapshot.status().ToString();
    return Rows(**snapshot);
  }
  static std::map<uint64_t, Row> Rows(StoreSnapshot& snapshot) {
    std::map<uint64_t, Row> rows;
    const auto add = [&](const RowRecords& records) {
      records.ForEach([&](const RowHead& head, const float* values) {
        Row row = {{values, values + head.num_floats()}, head.scalar};
        EXPECT_TRUE(rows.emplace(head.sign, std::move(row)).second) << "read twice";
      });
    };
    for (uint32_t shard = 0; shard < snapshot.num_shards(); ++shard) {
      StatusOr<bool> has_more = true;
      while (has_more.ok() && *has_more) {
        StoreSnapshot::Batch batch;
        has_more = snapshot.Read(shard, 50, &batch);
        add(batch.read);
        for (const RowRecords& records : batch.saved) add(records);
      }
      EXPECT_TRUE(has_more.ok()) << has_more.status().ToString();
    }
    return rows;
  }
};

// A store in memory that has run the script up to a batch that rises.
class ScriptModel {
 public:
  std::map<uint64_t, Script::Row> RowsAt(uint64_t batch) {
    while (batch_ < batch) EXPECT_TRUE(Script::Train(*store_, ++batch_).ok());
    EXPECT_EQ(batch_, batch);
    return Script::Rows(*store_);
  }

 private:
  uint64_t batch_ = 0;
  std::unique_ptr<EmbeddingStore> store_ = Script::InMemory();
};

}  // namespace persia::store

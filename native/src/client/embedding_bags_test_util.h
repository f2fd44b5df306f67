// What the tests of EmbeddingBags share: slots, batches, and short forms of its calls.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "client/embedding_bags.h"
#include "client/test_support.h"

namespace persia::client {

using store::LookupMode;
using store::UpdateReport;
using testing::Must;
using worker::SlotConfig;

// A batch as a person writes it: by slot, by sample, the IDs.
using SlotIds = std::vector<std::vector<uint64_t>>;

struct FlatBatch {
  std::vector<uint64_t> values;
  std::vector<int64_t> lengths;
};

inline FlatBatch Flatten(const std::vector<SlotIds>& slots) {
  FlatBatch batch;
  for (const SlotIds& samples : slots) {
    for (const auto& ids : samples) {
      batch.values.insert(batch.values.end(), ids.begin(), ids.end());
      batch.lengths.push_back(static_cast<int64_t>(ids.size()));
    }
  }
  return batch;
}

inline TrainConfig Sgd(float lr = 0.1f) {
  TrainConfig config;
  config.initializer = {.lower = -1.0f, .upper = 1.0f, .seed = 5};
  config.optimizer.lr = lr;
  config.weight_bound = 0.0f;
  return config;
}

// Rows begin with zeros, so that what gradients did to them is exact and easy to tell.
inline TrainConfig SgdFromZero() {
  TrainConfig config = Sgd(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  return config;
}

inline EmbeddingBagsOptions Options(std::vector<SlotConfig> slots, uint32_t num_threads = 1,
                                    uint64_t capacity = 1'000'000, uint32_t num_shards = 4) {
  return {.slots = std::move(slots),
          .store = {.capacity = capacity, .num_internal_shards = num_shards},
          .num_threads = num_threads};
}

inline std::unique_ptr<EmbeddingBags> Make(EmbeddingBagsOptions options,
                                           const TrainConfig& config) {
  auto bags = Must(EmbeddingBags::Create(std::move(options)));
  EXPECT_TRUE(bags->Configure(config, false).ok());
  return bags;
}

// One slot of dim 1 without a hash stack: the row of an ID is one number.
inline std::vector<SlotConfig> OneSlot() { return {{.name = "id", .dim = 1, .group = 0}}; }

inline PooledBags Train(EmbeddingBags& bags, const std::vector<SlotIds>& slots) {
  const FlatBatch batch = Flatten(slots);
  return Must(bags.Lookup(batch.values, batch.lengths, LookupMode::kTrain));
}

inline std::vector<float> Values(const PooledBags& pooled) {
  std::vector<float> values(pooled.rows.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), pooled.rows.data(), pooled.rows.size());
  return values;
}

inline std::vector<float> Infer(EmbeddingBags& bags, const std::vector<SlotIds>& slots) {
  const FlatBatch batch = Flatten(slots);
  PooledBags pooled = Must(bags.Lookup(batch.values, batch.lengths, LookupMode::kInference));
  EXPECT_EQ(pooled.batch, nullptr);
  return Values(pooled);
}

// Equal as bits: what == of floats would not tell apart is a difference too.
inline ::testing::AssertionResult SameBits(const std::vector<float>& a,
                                           const std::vector<float>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " and " << b.size() << " floats";
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "float " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

// Every dim that takes a way of its own through the kernels, alone and in shared groups, with and
// without scaling and hash stacks, groups not in the order of slots.
inline std::vector<SlotConfig> MixedSlots() {
  return {
      {.name = "d8", .dim = 8, .group = 3},
      {.name = "d1", .dim = 1, .group = 0},
      {.name = "d3", .dim = 3, .group = 7},
      {.name = "shared_a", .dim = 16, .group = 1},
      {.name = "d16", .dim = 16, .group = 2},
      {.name = "shared_b", .dim = 16, .sqrt_scaling = true, .group = 1},
      {.name = "d33", .dim = 33, .sqrt_scaling = true, .group = 4},
      {.name = "stack", .dim = 8, .hash_stack_rounds = 3, .hash_stack_size = 9, .group = 5},
      {.name = "d64", .dim = 64, .group = 6},
      {.name = "d128", .dim = 128, .group = 8},
      {.name = "stack_sqrt",
       .dim = 8,
       .sqrt_scaling = true,
       .hash_stack_rounds = 2,
       .hash_stack_size = 9,
       .group = 5},
      {.name = "d200", .dim = 200, .sqrt_scaling = true, .group = 9},
  };
}

// Each slot is single-ID, multi-hot with empty bags and duplicates, or has no ID at all.
inline std::vector<SlotIds> RandomBatch(std::mt19937& rng, size_t num_slots, size_t batch_size) {
  std::vector<SlotIds> slots(num_slots, SlotIds(batch_size));
  for (SlotIds& samples : slots) {
    const uint32_t kind = rng() % 8;
    for (auto& ids : samples) {
      ids.resize(kind == 0 ? 0 : kind < 4 ? 1 : rng() % 7);
      for (uint64_t& id : ids) id = rng() % 8 == 0 ? ~uint64_t{rng() % 5} : rng() % 30;
    }
  }
  return slots;
}

inline std::vector<float> Columns(const std::vector<float>& rows, size_t stride, size_t begin,
                                  size_t count) {
  std::vector<float> columns;
  for (size_t row = 0; row < rows.size(); row += stride) {
    columns.insert(columns.end(), rows.begin() + static_cast<ptrdiff_t>(row + begin),
                   rows.begin() + static_cast<ptrdiff_t>(row + begin + count));
  }
  return columns;
}

}  // namespace persia::client

// Builders and readers that the suites of this layer share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/hash.h"
#include "base/id_features.h"
#include "base/message_test_util.h"
#include "worker/lookup_plan.h"
#include "worker/slot_table.h"

namespace persia::worker {

// A feature as a person writes it: the IDs of each sample.
struct TestFeature {
  std::string name;
  std::vector<std::vector<uint64_t>> samples;
  std::vector<float> weights = {};  // of all IDs; empty: all 1
};
using TestBatch = std::vector<TestFeature>;

inline std::vector<std::byte> EncodeBatch(const TestBatch& batch) {
  std::vector<std::vector<uint32_t>> offsets(batch.size(), {0});
  std::vector<std::vector<uint64_t>> ids(batch.size());
  IdFeatures encoded;
  encoded.batch_size = static_cast<uint32_t>(batch[0].samples.size());
  for (size_t i = 0; i < batch.size(); ++i) {
    for (const auto& sample : batch[i].samples) {
      ids[i].insert(ids[i].end(), sample.begin(), sample.end());
      offsets[i].push_back(static_cast<uint32_t>(ids[i].size()));
    }
    encoded.features.push_back({batch[i].name, offsets[i], ids[i], batch[i].weights});
  }
  auto bytes = EncodeIdFeatures(encoded);
  EXPECT_TRUE(bytes.ok()) << bytes.status().ToString();
  return std::move(bytes).value();
}

using persia::testing::ToBuffer;

inline SlotTable MakeSlots(std::vector<SlotConfig> configs, uint32_t feature_index_prefix_bit = 8) {
  auto slots = SlotTable::Create(feature_index_prefix_bit, std::move(configs));
  EXPECT_TRUE(slots.ok()) << slots.status().ToString();
  return std::move(slots).value();
}

inline FeatureBatch MakeBatch(const TestBatch& batch, const SlotTable& slots) {
  auto decoded = FeatureBatch::Decode(ToBuffer(EncodeBatch(batch)), slots);
  EXPECT_TRUE(decoded.ok()) << decoded.status().ToString();
  return std::move(decoded).value();
}

// Every kind of slot, with groups that two and three slots share; odd dims, and dims on both sides
// of the one from which rows go through the simd layer.
inline std::vector<SlotConfig> MixedSlots() {
  return {
      {.name = "plain", .dim = 16, .group = 0},
      {.name = "sqrt", .dim = 16, .sqrt_scaling = true, .group = 0},
      {.name = "stacked", .dim = 3, .hash_stack_rounds = 2, .hash_stack_size = 10, .group = 1},
      {.name = "stacked_sqrt",
       .dim = 3,
       .sqrt_scaling = true,
       .hash_stack_rounds = 2,
       .hash_stack_size = 10,
       .group = 1},
      {.name = "mean", .dim = 16, .mean_scaling = true, .group = 0},
      {.name = "stacked_mean",
       .dim = 3,
       .mean_scaling = true,
       .hash_stack_rounds = 2,
       .hash_stack_size = 10,
       .group = 1},
      {.name = "raw", .dim = 16, .embedding_summation = false, .sample_fixed_size = 3, .group = 0},
      {.name = "raw_stacked",
       .dim = 5,
       .embedding_summation = false,
       .sqrt_scaling = true,
       .sample_fixed_size = 2,
       .hash_stack_rounds = 3,
       .hash_stack_size = 7,
       .group = 2},
  };
}

// All slots of the table above in a random order, with empty samples, repeated IDs, and a feature
// that has no IDs at all now and then.
inline TestBatch RandomBatch(std::mt19937& rng, size_t batch_size) {
  TestBatch batch;
  for (const SlotConfig& slot : MixedSlots()) {
    TestFeature feature{slot.name, std::vector<std::vector<uint64_t>>(batch_size)};
    const bool without_ids = rng() % 8 == 0;
    for (auto& sample : feature.samples) {
      sample.resize(without_ids ? 0 : rng() % 6);
      for (uint64_t& id : sample) id = rng() % 2 == 0 ? rng() % 20 : rng();
    }
    batch.push_back(std::move(feature));
  }
  std::shuffle(batch.begin(), batch.end(), rng);
  return batch;
}

// Small multiples of 1/8, whose sums are exact in float32 whatever their order.
inline float RowElement(uint64_t sign, uint32_t element) {
  const uint64_t bits = SignHash(sign + element * 0x9e3779b97f4a7c15ULL);
  return (static_cast<float>(bits % 64) - 31.5f) / 8;
}

inline std::vector<uint64_t> SignsOf(const SlotTable& slots, const SlotConfig& slot,
                                     std::span<const uint64_t> ids) {
  std::vector<uint64_t> signs(ids.size() * slot.num_buckets());
  slots.MakeSigns(slot, ids, signs.data());
  return signs;
}

// The rows that a lookup of the request answers, and where each server's begin.
struct TestAnswers {
  std::vector<std::vector<float>> rows;

  explicit TestAnswers(const LookupPlan& plan) {
    for (const ServerBlocks& request : plan.requests) {
      auto& answer = rows.emplace_back();
      size_t sign = 0;
      for (const auto& block : request.blocks) {
        for (uint32_t i = 0; i < block.num_signs; ++i, ++sign) {
          for (uint32_t e = 0; e < block.dim; ++e) {
            answer.push_back(RowElement(request.signs[sign], e));
          }
        }
      }
    }
  }
  std::vector<const float*> begins() const {
    std::vector<const float*> all;
    for (const auto& answer : rows) all.push_back(answer.data());
    return all;
  }
};

// One slot of an embeddings message.
struct TestSlot {
  bool raw = false;
  uint32_t dim = 0;
  uint32_t num_rows = 0;
  uint32_t sample_fixed_size = 0;
  std::vector<int64_t> index;
  std::vector<uint32_t> sample_num_ids;
  std::vector<float> rows;
};

struct TestEmbeddings {
  uint64_t worker_incarnation = 0;
  uint64_t reference = 0;
  uint32_t batch_size = 0;
  std::vector<std::string> order;
  std::map<std::string, TestSlot> slots;
};

template <typename T>
std::vector<T> CopyArray(ByteReader* reader, uint64_t count) {
  const auto array = reader->GetArray<T>(count);
  return {array.begin(), array.end()};
}

inline TestSlot ReadSlot(ByteReader* reader, uint32_t batch_size, std::string* name) {
  TestSlot slot;
  const auto name_bytes = reader->Get<uint32_t>();
  slot.raw = reader->Get<uint32_t>() == 1;
  slot.dim = reader->Get<uint32_t>();
  slot.num_rows = reader->Get<uint32_t>();
  slot.sample_fixed_size = reader->Get<uint32_t>();
  EXPECT_EQ(reader->Get<uint32_t>(), 0u);
  *name = reader->GetString(name_bytes);
  if (slot.raw) {
    slot.index = CopyArray<int64_t>(reader, uint64_t{batch_size} * slot.sample_fixed_size);
    slot.sample_num_ids = CopyArray<uint32_t>(reader, batch_size);
  }
  slot.rows = CopyArray<float>(reader, uint64_t{slot.num_rows} * slot.dim);
  return slot;
}

// As docs/wire_format.md has it.
inline TestEmbeddings ReadEmbeddings(std::span<const std::byte> message) {
  ByteReader reader(message);
  TestEmbeddings embeddings;
  embeddings.worker_incarnation = reader.Get<uint64_t>();
  embeddings.reference = reader.Get<uint64_t>();
  const auto num_slots = reader.Get<uint32_t>();
  embeddings.batch_size = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < num_slots; ++i) {
    std::string name;
    TestSlot slot = ReadSlot(&reader, embeddings.batch_size, &name);
    embeddings.order.push_back(name);
    embeddings.slots[name] = std::move(slot);
  }
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.remaining(), 0u);
  return embeddings;
}

inline TestEmbeddings ReadEmbeddings(const Buffer& message) {
  return ReadEmbeddings(message.span());
}

}  // namespace persia::worker

// EmbeddingStore against a plain model (std::map and std::list) over many random operations.
#include <gtest/gtest.h>

#include <list>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "base/hash.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

constexpr uint32_t kShards = 3;
constexpr uint64_t kCapacity = 301;
constexpr float kAdmit = 0.9f;

// SGD with learning rate 1 and no bound: an update subtracts, which float repeats exactly.
TrainConfig ModelConfig(float admit_probability = kAdmit) {
  TrainConfig config = SgdConfig(1.0f);
  config.weight_bound = 0.0f;
  config.admit_probability = admit_probability;
  return config;
}

std::unique_ptr<EmbeddingStore> MakeStoreThatNeverEvicts(float admit_probability) {
  return MakeStore({.capacity = 1'000'000, .num_internal_shards = 1},
                   ModelConfig(admit_probability));
}

class Model {
 public:
  std::vector<float> LookupTrain(uint64_t sign, uint32_t dim) {
    Shard& shard = ShardOf(sign);
    auto it = shard.rows.find(sign);
    if (it == shard.rows.end() || it->second.values.size() != dim) {
      // A row of another dim has been admitted already.
      if (it == shard.rows.end() && !Admits(sign)) return std::vector<float>(dim, 0.0f);
      Put(sign, Lookup(*initial_values_, {sign}, dim));
    } else {
      shard.order.splice(shard.order.end(), shard.order, it->second.place);
    }
    return shard.rows.at(sign).values;
  }

  std::vector<float> LookupInference(uint64_t sign, uint32_t dim) {
    const Shard& shard = ShardOf(sign);
    const auto it = shard.rows.find(sign);
    const bool has = it != shard.rows.end() && it->second.values.size() == dim;
    return has ? it->second.values : std::vector<float>(dim, 0.0f);
  }

  bool Subtract(uint64_t sign, const float* gradient, uint32_t dim) {
    Shard& shard = ShardOf(sign);
    const auto it = shard.rows.find(sign);
    if (it == shard.rows.end() || it->second.values.size() != dim) return false;
    for (uint32_t i = 0; i < dim; ++i) it->second.values[i] -= gradient[i];
    return true;
  }

  void Put(uint64_t sign, std::vector<float> values) {
    Shard& shard = ShardOf(sign);
    if (const auto old = shard.rows.find(sign); old != shard.rows.end()) {
      shard.order.erase(old->second.place);
      shard.rows.erase(old);
    }
    if (shard.rows.size() == shard.capacity) {
      shard.rows.erase(shard.order.front());
      shard.order.pop_front();
    }
    shard.order.push_back(sign);
    shard.rows[sign] = {std::move(values), std::prev(shard.order.end())};
  }

  void Clear() {
    for (Shard& shard : shards_) {
      shard.rows.clear();
      shard.order.clear();
    }
  }

  uint64_t size() const {
    uint64_t size = 0;
    for (const Shard& shard : shards_) size += shard.rows.size();
    return size;
  }

 private:
  struct Row {
    std::vector<float> values;
    std::list<uint64_t>::iterator place;
  };
  struct Shard {
    uint64_t capacity;
    std::map<uint64_t, Row> rows;
    std::list<uint64_t> order;  // oldest first
  };

  Shard& ShardOf(uint64_t sign) { return shards_[InternalShard(SignHash(sign), kShards)]; }

  bool Admits(uint64_t sign) {
    Lookup(*admissions_, {sign}, 1);
    return Has(*admissions_, sign, 1);
  }

  // Neither initial values nor admission depend on what
  // a store has seen, so other stores can tell them.
  std::unique_ptr<EmbeddingStore> initial_values_ = MakeStoreThatNeverEvicts(1.0f);
  std::unique_ptr<EmbeddingStore> admissions_ = MakeStoreThatNeverEvicts(kAdmit);
  Shard shards_[kShards] = {{kCapacity / kShards + 1, {}, {}},
                            {kCapacity / kShards, {}, {}},
                            {kCapacity / kShards, {}, {}}};
};

class ModelTest : public testing::Test {
 protected:
  // Distinct signs, the small ones often.
  std::vector<uint64_t> RandomSigns() {
    const size_t count = 1 + random_() % 60;
    std::vector<uint64_t> signs;
    std::set<uint64_t> seen;
    while (signs.size() < count) {
      const uint64_t sign = random_() % (random_() % 2 == 0 ? 200 : 1000);
      if (seen.insert(sign).second) signs.push_back(sign);
    }
    return signs;
  }
  uint32_t RandomDim() { return random_() % 50 == 0 ? 5 : 3; }

  void TrainStep(const std::vector<uint64_t>& signs, uint32_t dim) {
    const auto rows = Lookup(*store_, signs, dim);
    std::vector<float> expected;
    // The store handles a batch shard by shard; as shards share nothing, the model may go by sign.
    for (uint64_t sign : signs) Append(model_.LookupTrain(sign, dim), &expected);
    ASSERT_EQ(rows, expected);
  }
  void InferenceStep(const std::vector<uint64_t>& signs, uint32_t dim) {
    std::vector<float> expected;
    for (uint64_t sign : signs) Append(model_.LookupInference(sign, dim), &expected);
    ASSERT_EQ(Peek(*store_, signs, dim), expected);
  }
  void UpdateStep(const std::vector<uint64_t>& signs, uint32_t dim) {
    const auto gradients = RandomFloats(signs.size() * dim);
    uint64_t updated = 0;
    for (size_t i = 0; i < signs.size(); ++i) {
      updated += model_.Subtract(signs[i], &gradients[i * dim], dim) ? 1 : 0;
    }
    const UpdateReport report = Update(*store_, signs, dim, gradients);
    ASSERT_EQ(report.num_updated, updated);
    ASSERT_EQ(report.num_missing, signs.size() - updated);
  }
  void SetStep(const std::vector<uint64_t>& signs, uint32_t dim) {
    const auto rows = RandomFloats(signs.size() * dim);
    for (size_t i = 0; i < signs.size(); ++i) {
      // A row that is there is touched by being put anew, too.
      model_.Put(signs[i], {rows.begin() + static_cast<ptrdiff_t>(i * dim),
                            rows.begin() + static_cast<ptrdiff_t>((i + 1) * dim)});
    }
    ASSERT_TRUE(SetRows(*store_, signs, dim, rows).ok());
  }

  std::vector<float> RandomFloats(size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random_() % 1000) * 0.001f;
    return values;
  }
  static void Append(const std::vector<float>& part, std::vector<float>* all) {
    all->insert(all->end(), part.begin(), part.end());
  }

  std::mt19937 random_{5};
  std::unique_ptr<EmbeddingStore> store_ =
      MakeStore({.capacity = kCapacity, .num_internal_shards = kShards}, ModelConfig());
  Model model_;
};

TEST_F(ModelTest, TwoHundredThousandRandomRowOperations) {
  size_t operations = 0;
  for (int step = 0; operations < 200'000; ++step) {
    const auto signs = RandomSigns();
    const uint32_t dim = RandomDim();
    operations += signs.size();
    switch (random_() % 10) {
      case 0:
      case 1:
      case 2:
      case 3: TrainStep(signs, dim); break;
      case 4:
      case 5:
      case 6: UpdateStep(signs, dim); break;
      case 7:
      case 8: InferenceStep(signs, dim); break;
      default: SetStep(signs, dim); break;
    }
    ASSERT_FALSE(HasFatalFailure()) << "step " << step;
    ASSERT_EQ(store_->size(), model_.size());
    if (step % 2000 == 1999) {
      store_->Clear();
      model_.Clear();
    }
  }
}

}  // namespace
}  // namespace persia::store

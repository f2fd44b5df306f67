// EmbeddingStore against a plain model (std::map and std::list) over many random operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "store/sign_index.h"
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

std::unique_ptr<EmbeddingStore> MakeStoreThatNeverEvicts(float admit_probability, RowDtype dtype) {
  return MakeStore({.capacity = 1'000'000, .num_internal_shards = 1, .row_dtype = dtype},
                   ModelConfig(admit_probability));
}

// Rows by sign, and a list of them from the one that was touched the longest ago. Rows that one
// batch touched are equally old: which of them the store evicted, the model finds out from it.
class Model {
 public:
  explicit Model(RowDtype dtype) : format_(dtype) {}

  // What the lookup gives, before it is carried out by Train().
  std::vector<float> Expect(uint64_t sign, uint32_t dim) {
    const Row* row = Find(sign, dim);
    if (row != nullptr) return row->values;
    // A row of another dim has been admitted already.
    const bool has_row = ShardOf(sign).rows.count(sign) != 0;
    return has_row || Admits(sign) ? Lookup(*initial_values_, {sign}, dim)
                                   : std::vector<float>(dim, 0.0f);
  }
  std::vector<float> ExpectInference(uint64_t sign, uint32_t dim) {
    const Row* row = Find(sign, dim);
    return row != nullptr ? row->values : std::vector<float>(dim, 0.0f);
  }

  void Train(const std::vector<uint64_t>& signs, uint32_t dim, EmbeddingStore& store) {
    std::vector<std::pair<uint64_t, std::vector<float>>> missing;
    ++now_;
    for (uint64_t sign : signs) {
      const bool has_row = ShardOf(sign).rows.count(sign) != 0;
      if (Touch(sign, dim) || !(has_row || Admits(sign))) continue;
      missing.emplace_back(sign, Lookup(*initial_values_, {sign}, dim));
    }
    Insert(missing, store);
  }

  void Set(const std::vector<uint64_t>& signs, const std::vector<float>& rows, uint32_t dim,
           EmbeddingStore& store) {
    std::vector<std::pair<uint64_t, std::vector<float>>> missing;
    ++now_;
    for (size_t i = 0; i < signs.size(); ++i) {
      const auto begin = rows.begin() + static_cast<ptrdiff_t>(i * dim);
      std::vector<float> values(begin, begin + dim);
      Round(&values, [](const auto& narrow, uint16_t* out, const float* in, size_t n) {
        narrow.write(out, in, n);
      });
      if (Touch(signs[i], dim)) {
        ShardOf(signs[i]).rows.at(signs[i]).values = values;
      } else {
        missing.emplace_back(signs[i], values);
      }
    }
    Insert(missing, store);
  }

  bool Subtract(uint64_t sign, const float* gradient, uint32_t dim) {
    Row* row = Find(sign, dim);
    if (row == nullptr) return false;
    for (uint32_t i = 0; i < dim; ++i) row->values[i] -= gradient[i];
    Round(&row->values, [&](const auto& narrow, uint16_t* out, const float* in, size_t n) {
      narrow.write_stochastic(out, in, gradient, n);
    });
    return true;
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
  // To what rows can have.
  template <typename Write>
  void Round(std::vector<float>* values, Write write) const {
    const simd::NarrowRows* narrow = format_.narrow();
    if (narrow == nullptr) return;
    std::vector<uint16_t> written(values->size());
    write(*narrow, written.data(), values->data(), values->size());
    narrow->read(values->data(), written.data(), written.size());
  }

  struct Row {
    std::vector<float> values;
    uint64_t stamp;
    std::list<uint64_t>::iterator place;
  };
  struct Shard {
    uint64_t capacity;
    std::map<uint64_t, Row> rows;
    std::list<uint64_t> order;  // oldest first
  };

  Shard& ShardOf(uint64_t sign) { return shards_[ShardOfKey(SignKey(sign), kShards)]; }

  Row* Find(uint64_t sign, uint32_t dim) {
    Shard& shard = ShardOf(sign);
    const auto it = shard.rows.find(sign);
    return it != shard.rows.end() && it->second.values.size() == dim ? &it->second : nullptr;
  }

  // Whether there is such a row; one of another dim goes.
  bool Touch(uint64_t sign, uint32_t dim) {
    Shard& shard = ShardOf(sign);
    const auto it = shard.rows.find(sign);
    if (it == shard.rows.end()) return false;
    if (it->second.values.size() != dim) {
      Remove(shard, sign);
      return false;
    }
    it->second.stamp = now_;
    shard.order.splice(shard.order.end(), shard.order, it->second.place);
    return true;
  }

  void Insert(const std::vector<std::pair<uint64_t, std::vector<float>>>& missing,
              EmbeddingStore& store) {
    for (Shard& shard : shards_) {
      const auto num_new = std::count_if(missing.begin(), missing.end(), [&](const auto& row) {
        return &ShardOf(row.first) == &shard;
      });
      const uint64_t wanted = shard.rows.size() + static_cast<uint64_t>(num_new);
      if (wanted > shard.capacity) Evict(shard, wanted - shard.capacity, store);
    }
    for (const auto& [sign, values] : missing) {
      Shard& shard = ShardOf(sign);
      shard.order.push_back(sign);
      shard.rows[sign] = {values, now_, std::prev(shard.order.end())};
    }
  }

  void Evict(Shard& shard, uint64_t count, EmbeddingStore& store) {
    while (count > 0) {
      std::vector<uint64_t> oldest;
      const uint64_t stamp = shard.rows.at(shard.order.front()).stamp;
      ASSERT_LT(stamp, now_) << "no row of the batch itself";
      for (uint64_t sign : shard.order) {
        if (shard.rows.at(sign).stamp == stamp) oldest.push_back(sign);
      }
      if (oldest.size() > count) {
        std::erase_if(oldest, [&](uint64_t sign) {
          return Has(store, sign, static_cast<uint32_t>(shard.rows.at(sign).values.size()));
        });
        ASSERT_EQ(oldest.size(), count) << "evicted of those that were touched the longest ago";
      }
      count -= oldest.size();
      for (uint64_t sign : oldest) Remove(shard, sign);
    }
  }

  static void Remove(Shard& shard, uint64_t sign) {
    shard.order.erase(shard.rows.at(sign).place);
    shard.rows.erase(sign);
  }

  bool Admits(uint64_t sign) {
    Lookup(*admissions_, {sign}, 1);
    return Has(*admissions_, sign, 1);
  }

  // Neither initial values nor admission depend on what
  // a store has seen, so other stores can tell them.
  const RowFormat format_;
  std::unique_ptr<EmbeddingStore> initial_values_ = MakeStoreThatNeverEvicts(1.0f, format_.dtype());
  std::unique_ptr<EmbeddingStore> admissions_ =
      MakeStoreThatNeverEvicts(kAdmit, RowDtype::kFloat32);
  uint64_t now_ = 0;
  Shard shards_[kShards] = {{kCapacity / kShards + 1, {}, {}},
                            {kCapacity / kShards, {}, {}},
                            {kCapacity / kShards, {}, {}}};
};

class ModelTest : public testing::Test {
 protected:
  explicit ModelTest(RowDtype dtype = RowDtype::kFloat32)
      : store_(
            MakeStore({.capacity = kCapacity, .num_internal_shards = kShards, .row_dtype = dtype},
                      ModelConfig())),
        model_(dtype) {}

  void RunRandomly(size_t num_operations);

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
    std::vector<float> expected;
    for (uint64_t sign : signs) Append(model_.Expect(sign, dim), &expected);
    ASSERT_EQ(Lookup(*store_, signs, dim), expected);
    model_.Train(signs, dim, *store_);
  }
  void InferenceStep(const std::vector<uint64_t>& signs, uint32_t dim) {
    std::vector<float> expected;
    for (uint64_t sign : signs) Append(model_.ExpectInference(sign, dim), &expected);
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
    ASSERT_TRUE(SetRows(*store_, signs, dim, rows).ok());
    model_.Set(signs, rows, dim, *store_);
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
  std::unique_ptr<EmbeddingStore> store_;
  Model model_;
};

void ModelTest::RunRandomly(size_t num_operations) {
  size_t operations = 0;
  for (int step = 0; operations < num_operations; ++step) {
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

// Over a tier each takes four times as long.
TEST_F(ModelTest, RandomRowOperations) { RunRandomly(IsOverATier() ? 250'000 : 1'000'000); }

class NarrowRowsModelTest : public ModelTest, public testing::WithParamInterface<RowDtype> {
 protected:
  NarrowRowsModelTest() : ModelTest(GetParam()) {}
};

TEST_P(NarrowRowsModelTest, RandomRowOperations) { RunRandomly(150'000); }

INSTANTIATE_TEST_SUITE_P(Types, NarrowRowsModelTest,
                         testing::Values(RowDtype::kFloat16, RowDtype::kBfloat16));

}  // namespace
}  // namespace persia::store

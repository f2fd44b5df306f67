// Numbering against std::unordered_map, over many uses of one table.
#include "worker/unique_keys.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>
#include <vector>

namespace persia::worker {
namespace {

class Model {
 public:
  uint32_t Number(uint64_t key) {
    const auto [entry, inserted] = numbers_.emplace(key, static_cast<uint32_t>(keys.size()));
    if (inserted) keys.push_back(key);
    return entry->second;
  }
  std::vector<uint64_t> keys;

 private:
  std::unordered_map<uint64_t, uint32_t> numbers_;
};

void InsertAndCompare(const std::vector<uint64_t>& keys, UniqueKeys* unique, Model* model) {
  std::vector<uint32_t> numbers(keys.size() + 1, 12345);
  unique->Insert(keys, numbers.data());
  for (size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(numbers[i], model->Number(keys[i]));
  EXPECT_EQ(numbers.back(), 12345u);  // nothing behind the keys is written
  ASSERT_EQ(std::vector<uint64_t>(unique->keys().begin(), unique->keys().end()), model->keys);
}

TEST(UniqueKeysTest, NumbersInTheOrderOfFirstAppearance) {
  UniqueKeys unique;
  Model model;
  InsertAndCompare({5, 3, 5, 0, UINT64_MAX, 3, 0}, &unique, &model);
  EXPECT_EQ(model.keys, (std::vector<uint64_t>{5, 3, 0, UINT64_MAX}));
}

TEST(UniqueKeysTest, InsertsAddToWhatIsThere) {
  UniqueKeys unique;
  Model model;
  InsertAndCompare({1, 2}, &unique, &model);
  InsertAndCompare({}, &unique, &model);
  InsertAndCompare({3, 2, 1}, &unique, &model);
}

TEST(UniqueKeysTest, AsAMapOverManyUses) {
  UniqueKeys unique;
  std::mt19937_64 rng(1);
  for (int use = 0; use < 40; ++use) {
    unique.Clear();
    EXPECT_TRUE(unique.keys().empty());
    Model model;
    for (int insert = 0; insert < 4; ++insert) {
      // Large and small sets by turns; dense, sparse and shifted keys.
      std::vector<uint64_t> keys(rng() % (use % 4 == 0 ? 20000 : 300));
      const uint64_t range = 1 + rng() % 30000;
      const int shift = static_cast<int>(rng() % 3) * 24;
      for (uint64_t& key : keys) key = (rng() % range) << shift;
      InsertAndCompare(keys, &unique, &model);
    }
  }
}

}  // namespace
}  // namespace persia::worker

#include <gtest/gtest.h>

#include <vector>

#include "store/resident_rows.h"

namespace persia::store {
namespace {

TEST(HotKeysTest, ForgetsWhatHasGoneAndGivesTheOthersInOrderOnce) {
  SignIndex index;
  for (uint64_t key = 0; key < 10; ++key) {
    ASSERT_TRUE(index.Insert({key << 32, static_cast<uint32_t>(key), 0}));
  }
  HotKeys keys;
  const auto all = [&](auto is_hot) {
    std::vector<uint64_t> found;
    keys.ForEach(index, is_hot,
                 [&](const SignIndex::Entry& entry) { found.push_back(entry.key >> 32); });
    return found;
  };
  const auto each = [](const SignIndex::Entry&) { return true; };
  for (const uint64_t key : {5, 3, 5, 8, 77}) keys.Add(key << 32);  // 77 was removed
  EXPECT_EQ(all(each), (std::vector<uint64_t>{3, 5, 8}));
  for (const uint64_t key : {8, 1, 9}) keys.Add(key << 32);
  EXPECT_EQ(keys.size(), 6u);
  EXPECT_EQ(all([](const SignIndex::Entry& entry) { return entry.cell != 5; }),
            (std::vector<uint64_t>{1, 3, 8, 9}));
  EXPECT_EQ(all(each), (std::vector<uint64_t>{1, 3, 8, 9}));  // 5 was not there a moment ago
  EXPECT_EQ(keys.size(), 4u);
}

}  // namespace
}  // namespace persia::store

// SignIndex against std::map, and where hashes crowd.
#include "store/sign_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>

namespace persia::store {
namespace {

// By (tag, slot): several slots may share a tag.
bool Contains(const SignIndex& index, uint32_t tag, uint32_t slot) {
  return index.Find(tag, [slot](uint32_t s) { return s == slot; }) == slot;
}

TEST(SignIndexTest, IsEmptyAtFirst) {
  SignIndex index;
  EXPECT_EQ(index.FindFirst(0), SignIndex::kNone);
  EXPECT_EQ(index.FindFirst(UINT32_MAX), SignIndex::kNone);
  EXPECT_EQ(index.memory_bytes(), 0u);
}

// Tags of all kinds: spread, in one crowd, and at both ends of the range.
uint32_t RandomTag(std::mt19937& random) {
  switch (random() % 4) {
    case 0: return random();
    case 1: return 0x80000000u + random() % 64;
    case 2: return UINT32_MAX - random() % 8;
    default: return random() % 8;
  }
}

TEST(SignIndexTest, BehavesLikeASetOfPairs) {
  std::mt19937 random(3);
  SignIndex index;
  std::map<std::pair<uint32_t, uint32_t>, bool> model;
  for (int i = 0; i < 60'000; ++i) {
    const bool shrink = i / 10'000 % 2 == 1;
    if (!model.empty() && random() % 10 < (shrink ? 7 : 3)) {
      auto victim = model.lower_bound({RandomTag(random), 0});
      if (victim == model.end()) victim = model.begin();
      index.Erase(victim->first.first, victim->first.second);
      EXPECT_FALSE(Contains(index, victim->first.first, victim->first.second));
      model.erase(victim);
    } else {
      const uint32_t tag = RandomTag(random), slot = random() % 1000;
      if (!model.try_emplace({tag, slot}, true).second) continue;
      ASSERT_TRUE(index.Insert(tag, slot));
    }
    ASSERT_EQ(index.size(), model.size());
    if (i % 5000 != 0) continue;
    for (const auto& entry : model) {
      ASSERT_TRUE(Contains(index, entry.first.first, entry.first.second));
    }
  }
}

TEST(SignIndexTest, ManyEqualTagsAtTheEndOfTheTableNeedNoMoreThanALongerTail) {
  SignIndex index;
  for (uint32_t slot = 0; slot < 3000; ++slot) ASSERT_TRUE(index.Insert(UINT32_MAX, slot));
  for (uint32_t slot = 0; slot < 3000; ++slot) ASSERT_TRUE(Contains(index, UINT32_MAX, slot));
  EXPECT_EQ(index.FindFirst(UINT32_MAX - 1), SignIndex::kNone);
  EXPECT_LE(index.memory_bytes(), 100'000u);
}

TEST(SignIndexTest, CostsAtMostFourteenBytesAnEntryOnceLarge) {
  SignIndex index;
  std::mt19937 random(4);
  for (uint32_t slot = 0; slot < 300'000; ++slot) {
    ASSERT_TRUE(index.Insert(random(), slot));
    if (slot > 50'000 && slot % 1000 == 0) {
      ASSERT_LE(index.memory_bytes(), uint64_t{slot} * 14);
    }
  }
}

}  // namespace
}  // namespace persia::store

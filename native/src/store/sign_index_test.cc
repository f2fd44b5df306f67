// SignIndex against std::map, and where keys crowd.
#include "store/sign_index.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <vector>

namespace persia::store {
namespace {

TEST(SignKeyTest, IsABijectionWithThatInverse) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const uint64_t sign = i < 1000 ? static_cast<uint64_t>(i) : random();
    ASSERT_EQ(SignOfKey(SignKey(sign)), sign);
    ASSERT_EQ(SignKey(SignOfKey(sign)), sign);
  }
}

TEST(SignKeyTest, ShardsAreEvenlyFilled) {
  constexpr uint32_t kSigns = 120'000;
  for (uint32_t parts : {2u, 3u, 16u, 100u}) {
    std::vector<uint32_t> shards(parts);
    for (uint64_t sign = 0; sign < kSigns; ++sign) ++shards[ShardOfKey(SignKey(sign), parts)];
    const double mean = double{kSigns} / parts;
    for (uint32_t count : shards) EXPECT_NEAR(count, mean, 6 * std::sqrt(mean)) << parts;
  }
}

TEST(SignIndexTest, IsEmptyAtFirst) {
  SignIndex index;
  EXPECT_EQ(index.Find(0), nullptr);
  EXPECT_EQ(index.Find(UINT64_MAX), nullptr);
  EXPECT_EQ(index.memory_bytes(), 0u);
}

// Keys of all kinds: spread, in one crowd, and at both ends of the range.
uint64_t RandomKey(std::mt19937_64& random) {
  switch (random() % 4) {
    case 0: return random();
    case 1: return 0x8000000000000000u + random() % 3000;
    case 2: return UINT64_MAX - random() % 2000;
    default: return random() % 3000;
  }
}

TEST(SignIndexTest, BehavesLikeAMap) {
  std::mt19937_64 random(3);
  SignIndex index;
  std::map<uint64_t, uint32_t> model;
  for (int i = 0; i < 60'000; ++i) {
    const bool shrink = i / 10'000 % 2 == 1;
    if (!model.empty() && random() % 10 < (shrink ? 7 : 3)) {
      auto victim = model.lower_bound(RandomKey(random));
      if (victim == model.end()) victim = model.begin();
      index.Erase(index.Find(victim->first));
      EXPECT_EQ(index.Find(victim->first), nullptr);
      model.erase(victim);
    } else {
      const uint64_t key = RandomKey(random);
      const auto cell = static_cast<uint32_t>(random() % 1000);
      if (!model.try_emplace(key, cell).second) continue;
      ASSERT_TRUE(index.Insert({key, cell, 7}));
    }
    ASSERT_EQ(index.size(), model.size());
    if (i % 5000 != 0) continue;
    auto expected = model.begin();
    index.ForEach([&](const SignIndex::Entry& entry) {
      ASSERT_EQ(entry.key, expected->first);
      ASSERT_EQ(entry.cell, expected->second);
      ASSERT_EQ(index.Find(entry.key), &entry);
      ++expected;
    });
    ASSERT_EQ(expected, model.end());
  }
}

TEST(SignIndexTest, CrowdedKeysAtTheEndOfTheTableNeedNoMoreThanALongerTail) {
  SignIndex index;
  for (uint32_t i = 0; i < 3000; ++i) ASSERT_TRUE(index.Insert({UINT64_MAX - i, i, 0}));
  for (uint32_t i = 0; i < 3000; ++i) ASSERT_EQ(index.Find(UINT64_MAX - i)->cell, i);
  EXPECT_EQ(index.Find(UINT64_MAX - 3000), nullptr);
  EXPECT_LE(index.memory_bytes(), 200'000u);
}

TEST(SignIndexTest, CostsAtMostTwentySixBytesAnEntryOnceLarge) {
  SignIndex index;
  for (uint32_t cell = 0; cell < 300'000; ++cell) {
    ASSERT_TRUE(index.Insert({SignKey(cell), cell, 0}));
    if (cell > 50'000 && cell % 1000 == 0) {
      ASSERT_LE(index.memory_bytes(), uint64_t{cell} * 26);
    }
  }
}

TEST(SignIndexTest, TakesWhatRoomWasReservedForWithoutGrowing) {
  constexpr uint64_t kEntries = 300'000;
  SignIndex index;
  ASSERT_TRUE(index.Insert({SignKey(0), 0, 0}));
  index.Reserve(kEntries);
  const uint64_t memory_bytes = index.memory_bytes();
  EXPECT_LE(memory_bytes, kEntries * 26);
  for (uint32_t cell = 1; cell < kEntries; ++cell) {
    ASSERT_TRUE(index.Insert({SignKey(cell), cell, 0}));
  }
  EXPECT_EQ(index.memory_bytes(), memory_bytes);
  for (uint32_t cell = 0; cell < kEntries; ++cell) {
    ASSERT_EQ(index.Find(SignKey(cell))->cell, cell);
  }
  index.Reserve(10);
  EXPECT_EQ(index.memory_bytes(), memory_bytes) << "it never shrinks";
}

TEST(SignIndexTest, PhasesKeepIndexesThatFillTogetherFromGrowingTogether) {
  constexpr uint32_t kIndexes = 16;
  std::vector<SignIndex> indexes;
  for (uint32_t i = 0; i < kIndexes; ++i) indexes.emplace_back(i / double{kIndexes});
  for (uint32_t cell = 0; cell < 100'000; ++cell) {
    uint64_t bytes = 0;
    for (SignIndex& index : indexes) {
      ASSERT_TRUE(index.Insert({SignKey(cell), cell, 0}));
      bytes += index.memory_bytes();
    }
    if (cell > 20'000) {
      ASSERT_LE(bytes, uint64_t{24} * kIndexes * cell);
    }
  }
}

TEST(SignIndexTest, PhasesStayApartWhereRoomWasReserved) {
  constexpr uint32_t kIndexes = 16, kReserved = 50'000;
  std::vector<SignIndex> indexes;
  for (uint32_t i = 0; i < kIndexes; ++i) {
    indexes.emplace_back(i / double{kIndexes}).Reserve(kReserved);
  }
  for (uint32_t cell = 0; cell < 3 * kReserved; ++cell) {
    uint64_t bytes = 0;
    uint32_t num_grown = 0;
    for (SignIndex& index : indexes) {
      const uint64_t before = index.memory_bytes();
      ASSERT_TRUE(index.Insert({SignKey(cell), cell, 0}));
      bytes += index.memory_bytes();
      if (index.memory_bytes() != before) ++num_grown;
    }
    ASSERT_LE(num_grown, 2u) << cell;
    if (cell >= kReserved) {
      ASSERT_LE(bytes, uint64_t{24} * kIndexes * cell);
    }
  }
}

}  // namespace
}  // namespace persia::store

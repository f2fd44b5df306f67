#include "client/held_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

namespace persia::client {
namespace {

constexpr store::RowShape kShape{.dim = 4, .state_floats = 4};

std::vector<uint64_t> Signs(uint64_t first, uint64_t count) {
  std::vector<uint64_t> signs(count);
  std::iota(signs.begin(), signs.end(), first);
  return signs;
}

// Uses the signs in batch `batch`, and inserts those that are not held.
uint64_t Look(HeldRows& rows, std::span<const uint64_t> signs, uint64_t batch) {
  std::vector<uint32_t> cells(signs.size());
  const uint64_t num_held = rows.Use(signs, batch, cells);
  for (size_t i = 0; i < signs.size(); ++i) {
    if (cells[i] != HeldRows::kNoCell) {
      EXPECT_EQ(rows.values(cells[i])[0], static_cast<float>(signs[i]));
      continue;
    }
    const std::vector<float> row(8, static_cast<float>(signs[i]));
    EXPECT_TRUE(rows.Insert(signs[i], kShape, row.data(), batch).ok());
  }
  return num_held;
}

TEST(HeldRowsTest, KeepsTheValuesOfARowThatIsHeld) {
  HeldRows rows(0);
  const auto signs = Signs(1, 3);
  EXPECT_EQ(Look(rows, signs, 1), 0u);
  const std::vector<float> stale(8, -1.0f);
  auto row = rows.Insert(2, kShape, stale.data(), 2);
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(rows.values(row->cell)[0], 2.0f);
  EXPECT_EQ(Look(rows, signs, 3), 3u);
  rows.Clear();
  EXPECT_EQ(rows.size(), 0u);
  EXPECT_EQ(Look(rows, signs, 4), 0u);
}

TEST(HeldRowsTest, EvictsOnlyRowsThatNoBatchNeeds) {
  HeldRows rows(0);
  Look(rows, Signs(0, 100), 7);
  Look(rows, Signs(50, 100), 8);
  rows.Trim(7);
  EXPECT_EQ(rows.size(), 150u);
  for (int i = 0; i < 20; ++i) rows.Trim(8);
  EXPECT_EQ(rows.size(), 100u);
  EXPECT_EQ(Look(rows, Signs(50, 100), 9), 100u);
}

// An answer that is late, of a batch before those that have used the row since.
TEST(HeldRowsTest, ALateAnswerMakesNoRowOlder) {
  HeldRows rows(0);
  Look(rows, Signs(0, 10), 9);
  Look(rows, Signs(0, 10), 8);
  rows.Trim(9);
  EXPECT_EQ(rows.size(), 10u);
}

TEST(HeldRowsTest, TellsRowsThatAreNew) {
  HeldRows rows(0);
  const std::vector<float> row(8, 1.0f);
  EXPECT_TRUE(rows.Insert(1, kShape, row.data(), 1)->is_new);
  EXPECT_FALSE(rows.Insert(1, kShape, row.data(), 2)->is_new);
  for (const uint64_t sign : {1, 2}) rows.Drop(sign);
  EXPECT_EQ(rows.size(), 0u);
  EXPECT_TRUE(rows.Insert(1, kShape, row.data(), 3)->is_new);
}

TEST(HeldRowsTest, EvictsAllThatIsBeyondTheBoundWhenNoBatchIsInFlight) {
  for (const uint64_t max_bytes : {0, 100'000}) {
    HeldRows rows(max_bytes);
    for (uint64_t batch = 1; batch <= 8; ++batch) Look(rows, Signs(batch * 5000, 5000), batch);
    for (int i = 0; i < 9; ++i) rows.Trim(/*oldest=*/1);
    rows.Trim(/*oldest=*/9);
    EXPECT_LE(rows.size(), max_bytes / (8 * sizeof(float)) * 9 / 8);
    EXPECT_EQ(rows.size() > 0, max_bytes > 0);
  }
}

TEST(HeldRowsTest, EvictsABurstWithTheNextBatch) {
  constexpr uint64_t kBytes = 100'000;
  HeldRows rows(kBytes);
  for (uint64_t batch = 1; batch <= 8; ++batch) Look(rows, Signs(batch * 5000, 5000), batch);
  for (int i = 0; i < 9; ++i) rows.Trim(/*oldest=*/1);
  Look(rows, Signs(0, 10), 9);
  rows.Trim(/*oldest=*/9);
  rows.Trim(/*oldest=*/9);
  EXPECT_LE(rows.size(), kBytes / (8 * sizeof(float)));
}

// Rows of one shape after many of another, whose cells it cannot use.
TEST(HeldRowsTest, CompactsTheMemoryOfSeveralShapes) {
  constexpr uint64_t kBytes = 8 << 20, kRows = 60'000;
  constexpr store::RowShape kWide{.dim = 64, .state_floats = 64, .has_scalar = true};
  HeldRows rows(kBytes);
  std::vector<float> values(129);
  for (uint64_t sign = 0; sign < kRows; ++sign) {
    std::ranges::fill(values, static_cast<float>(sign));
    ASSERT_TRUE(rows.Insert(sign, kWide, values.data(), sign < 100 ? 2 : 1).ok());
  }
  for (uint64_t batch = 2; batch < 100; ++batch) {
    Look(rows, Signs(kRows + batch * 1000, 1000), batch);
    rows.Trim(2);
  }
  EXPECT_GT(rows.memory_bytes(), 2 * kBytes);
  ASSERT_TRUE(rows.IsWasteful());
  auto signs = Signs(0, 101);
  std::vector<uint32_t> cells(signs.size());
  rows.Use(signs, 100, cells);
  cells[100] = HeldRows::kNoCell;
  ASSERT_TRUE(rows.Compact(2));
  EXPECT_FALSE(rows.IsWasteful());
  EXPECT_LT(rows.memory_bytes(), 2 * kBytes);
  EXPECT_EQ(rows.size(), 100u + 98 * 1000);
  rows.Find(signs, cells);
  EXPECT_EQ(cells[100], HeldRows::kNoCell);
  for (uint64_t sign = 0; sign < 100; ++sign) {
    const store::RowView row = rows.View(cells[sign]);
    EXPECT_EQ(row.values[63], static_cast<float>(sign));
    EXPECT_EQ(row.state[63], static_cast<float>(sign));
    EXPECT_EQ(std::bit_cast<float>(*row.scalar), static_cast<float>(sign));
  }
  EXPECT_EQ(Look(rows, Signs(kRows + 99'000, 1000), 101), 1000u);
  rows.Trim(102);
  EXPECT_LE(rows.size(), kBytes / (8 * sizeof(float)));
}

// New rows in each batch, and some that are frequent.
TEST(HeldRowsTest, StaysNearTheBoundAndKeepsFrequentRows) {
  constexpr uint64_t kBytes = 1 << 20, kNew = 500;
  HeldRows rows(kBytes);
  const auto frequent = Signs(0, 100);
  for (uint64_t batch = 1; batch < 5000; ++batch) {
    EXPECT_EQ(Look(rows, frequent, batch), batch == 1 ? 0u : frequent.size());
    Look(rows, Signs(1000 + batch * kNew, kNew), batch);
    rows.Trim(batch);
    ASSERT_LT(rows.size(), kBytes / (8 * sizeof(float)) + 4 * kNew) << batch;
  }
  EXPECT_LT(rows.memory_bytes(), 2 * kBytes);
  EXPECT_GT(rows.size(), kBytes / 100) << "a row has 32 bytes and an entry of the index 24";
}

}  // namespace
}  // namespace persia::client

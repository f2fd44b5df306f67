// RowSlabs: where rows lie and how slots are reused.
#include "store/row_slabs.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

namespace persia::store {
namespace {

TEST(RowShapeTest, StrideKeepsCacheLinesWhereThatIsCheap) {
  auto stride = [](uint32_t dim, uint32_t state) {
    return RowShape{.dim = dim, .state_floats = state, .has_scalar = false}.Stride();
  };
  EXPECT_EQ(stride(16, 16), 32u);
  EXPECT_EQ(stride(12, 0), 16u) << "16 bytes of padding make whole lines";
  EXPECT_EQ(stride(8, 16), 24u) << "32 bytes of padding would not pay";
  EXPECT_EQ(stride(1, 0), 4u);
}

TEST(RowSlabsTest, RowsAreAlignedDisjointAndStayWhereTheyAre) {
  RowSlabs slabs;
  const uint32_t narrow = slabs.FindOrAddPool({.dim = 5, .state_floats = 5, .has_scalar = true});
  const uint32_t wide = slabs.FindOrAddPool({.dim = 64, .state_floats = 64, .has_scalar = false});
  std::vector<uint32_t> slots;
  for (uint32_t i = 0; i < 20'000; ++i) {
    slots.push_back(slabs.Allocate(i % 4 == 0 ? wide : narrow));
    const RowView row = slabs.View(slots.back());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(row.values) % (i % 4 == 0 ? 64 : 16), 0u);
    for (uint32_t f = 0; f < 2 * row.dim; ++f) row.values[f] = static_cast<float>(i);
    EXPECT_EQ(row.scalar == nullptr, i % 4 == 0);
    if (row.scalar != nullptr) *row.scalar = i;
  }
  for (uint32_t i = 0; i < slots.size(); ++i) {
    const RowView row = slabs.View(slots[i]);
    for (uint32_t f = 0; f < 2 * row.dim; ++f) ASSERT_EQ(row.values[f], static_cast<float>(i));
    if (row.scalar != nullptr) {
      ASSERT_EQ(*row.scalar, i);
    }
  }
}

TEST(RowSlabsTest, FreedSlotsAreReusedWithinTheirPoolOnly) {
  RowSlabs slabs;
  const uint32_t a = slabs.FindOrAddPool({.dim = 4});
  const uint32_t b = slabs.FindOrAddPool({.dim = 8});
  std::set<uint32_t> freed;
  for (int i = 0; i < 100; ++i) freed.insert(slabs.Allocate(a));
  for (uint32_t slot : freed) slabs.Free(slot);
  EXPECT_EQ(freed.count(slabs.Allocate(b)), 0u);
  const uint64_t bytes = slabs.memory_bytes();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(freed.erase(slabs.Allocate(a)), 1u);
  EXPECT_EQ(slabs.memory_bytes(), bytes);
}

TEST(RowSlabsTest, TheLongestRowHasASlabOfItsOwn) {
  RowSlabs slabs;
  const uint32_t pool =
      slabs.FindOrAddPool({.dim = 65'536, .state_floats = 131'072, .has_scalar = true});
  for (uint64_t sign = 0; sign < 5; ++sign) {
    const uint32_t slot = slabs.Allocate(pool);
    ASSERT_NE(slot, RowSlabs::kNoSlot);
    std::memset(slabs.values(slot), 1, size_t{196'608} * sizeof(float));
  }
  EXPECT_GE(slabs.memory_bytes(), 5u * 786'432);
}

}  // namespace
}  // namespace persia::store

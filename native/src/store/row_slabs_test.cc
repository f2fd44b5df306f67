// RowSlabs: where rows lie and how cells are reused.
#include "store/row_slabs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "store/resident_test_util.h"

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
  SlabMemory memory;
  RowSlabs slabs(&memory);
  const uint32_t narrow = slabs.FindOrAddPool({.dim = 5, .state_floats = 5, .has_scalar = true});
  const uint32_t wide = slabs.FindOrAddPool({.dim = 64, .state_floats = 64, .has_scalar = false});
  std::vector<uint32_t> cells;
  for (uint32_t i = 0; i < 20'000; ++i) {
    cells.push_back(slabs.Allocate(i % 4 == 0 ? wide : narrow));
    const RowView row = slabs.View(cells.back());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(row.values) % (i % 4 == 0 ? 64 : 16), 0u);
    for (uint32_t f = 0; f < 2 * row.dim; ++f) row.values[f] = static_cast<float>(i);
    EXPECT_EQ(row.scalar == nullptr, i % 4 == 0);
    if (row.scalar != nullptr) *row.scalar = i;
  }
  for (uint32_t i = 0; i < cells.size(); ++i) {
    const RowView row = slabs.View(cells[i]);
    for (uint32_t f = 0; f < 2 * row.dim; ++f) ASSERT_EQ(row.values[f], static_cast<float>(i));
    if (row.scalar != nullptr) {
      ASSERT_EQ(*row.scalar, i);
    }
  }
}

TEST(RowSlabsTest, FreedCellsAreReusedWithinTheirPoolOnly) {
  SlabMemory memory;
  RowSlabs slabs(&memory);
  const uint32_t a = slabs.FindOrAddPool({.dim = 4});
  const uint32_t b = slabs.FindOrAddPool({.dim = 8});
  std::set<uint32_t> freed;
  for (int i = 0; i < 100; ++i) freed.insert(slabs.Allocate(a));
  for (uint32_t cell : freed) slabs.Free(cell);
  EXPECT_EQ(freed.count(slabs.Allocate(b)), 0u);
  const uint64_t bytes = slabs.memory_bytes();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(freed.erase(slabs.Allocate(a)), 1u);
  EXPECT_EQ(slabs.memory_bytes(), bytes);
}

// A row's number is its values and its scalar.
class NumberedRows {
 public:
  explicit NumberedRows(RowSlabs* slabs) : slabs_(*slabs) {}

  void Add(const RowShape& shape) {
    const uint32_t cell = slabs_.Allocate(slabs_.FindOrAddPool(shape));
    ASSERT_NE(cell, RowSlabs::kNoCell);
    const RowView row = slabs_.View(cell);
    std::fill_n(row.values, shape.Stride(), static_cast<float>(next_));
    if (row.scalar != nullptr) *row.scalar = next_;
    cells_.emplace(next_++, cell);
  }
  void FreeAllBut(uint32_t every) {
    std::erase_if(cells_, [&](const auto& row) {
      if (row.first % every == 0) return false;
      slabs_.Free(row.second);
      return true;
    });
  }
  // As many slabs as can.
  void GiveBack() {
    while (slabs_.CanLeave()) {
      slabs_.BeginLeaving(UINT64_MAX);
      ASSERT_TRUE(slabs_.HasLeaving());
      for (auto& [number, cell] : cells_) {
        if (!slabs_.IsLeaving(cell)) continue;
        const RowShape& shape = slabs_.shape(cell);
        const uint32_t to = slabs_.Allocate(slabs_.FindPool(shape));
        ASSERT_FALSE(slabs_.IsLeaving(to));
        std::copy_n(slabs_.values(cell), shape.Stride(), slabs_.values(to));
        if (shape.has_scalar) *slabs_.scalar(to) = *slabs_.scalar(cell);
        slabs_.Free(cell);
        cell = to;
      }
      slabs_.FinishLeaving();
      ASSERT_FALSE(slabs_.HasLeaving());
    }
  }
  void Check() const {
    std::set<uint32_t> cells;
    for (const auto& [number, cell] : cells_) {
      ASSERT_TRUE(cells.insert(cell).second);
      const RowView row = slabs_.View(cell);
      const uint32_t stride = slabs_.shape(cell).Stride();
      ASSERT_EQ(std::count(row.values, row.values + stride, static_cast<float>(number)), stride);
      if (row.scalar != nullptr) {
        ASSERT_EQ(*row.scalar, number);
      }
    }
  }
  size_t size() const { return cells_.size(); }

 private:
  RowSlabs& slabs_;
  uint32_t next_ = 0;
  std::map<uint32_t, uint32_t> cells_;
};

TEST(RowSlabsTest, SlabsWhoseRowsHaveRoomElsewhereGoBack) {
  constexpr RowShape kNarrow = {.dim = 16, .state_floats = 16};
  constexpr RowShape kWide = {.dim = 64, .state_floats = 64, .has_scalar = true};
  SlabMemory memory;
  RowSlabs slabs(&memory);
  NumberedRows rows(&slabs);
  const auto num_bytes = [&] { return slabs.memory_bytes() + memory.unused_bytes(); };
  for (int i = 0; i < 30'000; ++i) rows.Add(i % 2 == 0 ? kNarrow : kWide);
  const uint64_t all = num_bytes();
  EXPECT_FALSE(slabs.CanLeave()) << "there is nothing to give";
  slabs.BeginLeaving(UINT64_MAX);
  EXPECT_FALSE(slabs.HasLeaving());
  rows.FreeAllBut(5);
  rows.Check();
  rows.GiveBack();
  rows.Check();
  EXPECT_LE(slabs.row_slab_bytes(), all / 4);
  EXPECT_LE(num_bytes(), all / 2) << "what is left of blocks included";
  for (size_t i = rows.size(); i < 30'000; ++i) rows.Add(i % 2 == 0 ? kNarrow : kWide);
  rows.Check();
  EXPECT_LE(num_bytes(), all * 21 / 20);
}

// Slabs of a few rows, of which blocks have many.
TEST(RowSlabsTest, WhatHasLeftIsNoLongerResident) {
  if (kSanitized) GTEST_SKIP() << "sanitizers have memory of their own";
  constexpr RowShape kShape = {.dim = 512};
  SlabMemory memory;
  RowSlabs slabs(&memory);
  NumberedRows rows(&slabs);
  for (int i = 0; i < 32'000; ++i) rows.Add(kShape);
  const uint64_t before = ResidentBytes();
  rows.FreeAllBut(8);
  rows.GiveBack();
  EXPECT_LE(ResidentBytes(), before - (50 << 20)) << "of 62 MiB, an eighth of which is used";
  rows.Check();
}

TEST(RowSlabsTest, ASlabLeavesWhenItsLastRowHas) {
  constexpr RowShape kShape = {.dim = 64};
  SlabMemory memory;
  RowSlabs slabs(&memory);
  const uint32_t pool = slabs.FindOrAddPool(kShape);
  std::vector<uint32_t> cells;
  for (int i = 0; i < 1000; ++i) cells.push_back(slabs.Allocate(pool));
  for (int i = 0; i < 900; ++i) slabs.Free(cells[i]);
  const uint64_t before = slabs.row_slab_bytes();
  ASSERT_TRUE(slabs.CanLeave());
  slabs.BeginLeaving(UINT64_MAX);
  ASSERT_TRUE(slabs.IsLeaving(cells.back()));
  slabs.FinishLeaving();
  EXPECT_TRUE(slabs.HasLeaving()) << "rows are there";
  const uint64_t half = slabs.row_slab_bytes();
  EXPECT_LT(half, before) << "but not everywhere";
  for (int i = 900; i < 1000; ++i) {
    if (slabs.IsLeaving(cells[i])) slabs.Free(cells[i]);
  }
  slabs.FinishLeaving();
  EXPECT_FALSE(slabs.HasLeaving());
  EXPECT_LT(slabs.row_slab_bytes(), half);
}

TEST(SlabMemoryTest, WhatIsGivenIsTakenAgainOrGoesBackBlockByBlock) {
  SlabMemory memory;
  std::vector<SlabPiece> pieces;
  for (int i = 0; i < 32; ++i) pieces.push_back(memory.Take(1024, 128));  // 128 KiB
  ASSERT_EQ(pieces.front().block, pieces[15].block);
  ASSERT_NE(pieces.front().block, pieces[16].block);
  const std::weak_ptr<MappedMemory> first = pieces[0].block, second = pieces[16].block;
  for (int i = 0; i < 15; ++i) memory.Give(std::exchange(pieces[i], {}));
  EXPECT_EQ(memory.unused_bytes(), 0u) << "their pages are gone, if not the block";
  EXPECT_FALSE(first.expired());
  memory.Give(std::exchange(pieces[15], {}));
  EXPECT_TRUE(first.expired());
  const std::byte* data = pieces[20].data;
  memory.Give(std::exchange(pieces[20], {}));
  pieces[20] = memory.Take(1000, 200);
  EXPECT_EQ(pieces[20].data, data) << "room for half of them is enough";
  memory.Give(std::exchange(pieces[20], {}));
  EXPECT_NE(memory.Take(1000, 300).data, data) << "too small";
  EXPECT_FALSE(second.expired());
  pieces.clear();
  memory.Clear();
  EXPECT_TRUE(second.expired());
}

// Beyond what the rows themselves take; shards are filled evenly, as signs spread.
double WorstBytesARow(const RowShape& shape, uint64_t first_judged, uint64_t num_rows) {
  constexpr uint64_t kShards = 16;
  SlabMemory memory;
  std::vector<RowSlabs> shards(kShards, RowSlabs(&memory));
  const auto row_bytes =
      static_cast<double>(shape.Stride() * sizeof(float) + (shape.has_scalar ? 4 : 0));
  double worst = 0;
  for (uint64_t rows = 1; rows <= num_rows; ++rows) {
    RowSlabs& shard = shards[rows % kShards];
    EXPECT_NE(shard.Allocate(shard.FindOrAddPool(shape)), RowSlabs::kNoCell);
    if (rows < first_judged || rows % 1024 != 0) continue;
    uint64_t bytes = memory.unused_bytes();
    for (const RowSlabs& slabs : shards) bytes += slabs.memory_bytes();
    worst = std::max(worst, static_cast<double>(bytes) / static_cast<double>(rows) - row_bytes);
  }
  return worst;
}

TEST(RowSlabsTest, SlabsBegunWeighLittleAtAnySize) {
  // Memory is not touched and so not taken, but for the first rows, whose pages are made huge.
  EXPECT_LE(WorstBytesARow({.dim = 16, .has_scalar = true}, 100'000, 4'000'000), 10);
  EXPECT_LE(WorstBytesARow({.dim = 16, .state_floats = 16}, 100'000, 4'000'000), 10);
  EXPECT_LE(WorstBytesARow({.dim = 128, .has_scalar = true}, 100'000, 1'000'000), 10);
}

TEST(RowSlabsTest, MemoryOfOneOutlivesTheOthers) {
  SlabMemory memory;
  auto slabs = std::make_unique<RowSlabs>(&memory);
  RowSlabs kept(&memory);
  const uint32_t cell = kept.Allocate(kept.FindOrAddPool({.dim = 4}));
  const uint32_t other = slabs->Allocate(slabs->FindOrAddPool({.dim = 4}));
  EXPECT_LT(std::abs(slabs->values(other) - kept.values(cell)), 2 << 18) << "one block";
  *kept.values(cell) = 7;
  slabs.reset();
  memory.Clear();
  EXPECT_EQ(*kept.values(cell), 7);
}

TEST(RowSlabsTest, SlabNumbersSufficeForWideRows) {
  // A cell is the slab's number above the row's place in 16 bits. No row is touched.
  constexpr uint64_t kRows = 4096, kRowBytes = 65'536, kSlabNumbers = 65'535;
  SlabMemory memory;
  RowSlabs slabs(&memory);
  const uint32_t pool = slabs.FindOrAddPool({.dim = kRowBytes / sizeof(float)});
  uint64_t num_slabs = 0, last_slab_rows = 0;
  for (uint64_t row = 0; row < kRows; ++row) {
    const uint32_t cell = slabs.Allocate(pool);
    ASSERT_NE(cell, RowSlabs::kNoCell);
    last_slab_rows = cell >> 16 == num_slabs ? 1 : last_slab_rows + 1;
    num_slabs = std::max<uint64_t>(num_slabs, (cell >> 16) + 1);
    ASSERT_LE(slabs.memory_bytes(), (row + 1) * (kRowBytes + kRowBytes / 8 + 64) + 1024) << row;
  }
  EXPECT_GE(kRows + (kSlabNumbers - num_slabs) * (SlabMemory::kBlockBytes / kRowBytes), 2'000'000u)
      << num_slabs << " slabs";
}

TEST(RowSlabsTest, WideRowsGetHugePagesWhereAScalarLeavesOneNotQuiteFull) {
  SlabMemory memory;
  const SlabPiece piece = memory.Take(65'536 + sizeof(uint32_t), 31);
  EXPECT_EQ(piece.size, MappedMemory::kHugePageBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(piece.data) % MappedMemory::kHugePageBytes, 0u);
  EXPECT_LT(memory.Take(786'432, 2).size, MappedMemory::kHugePageBytes) << "too much would be left";
}

// The system's flags for the memory at an address: "nh" is for small pages only, "hg" for huge
// ones where there are any. Empty: it does not say.
std::string PageFlags(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::ifstream maps("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2) {
      found = begin <= address && address < end;
    }
    if (found && line.starts_with("VmFlags:")) return line + " ";
  }
  return "";
}

TEST(SlabMemoryTest, BlocksMoveToHugePagesHoweverTheyEnd) {
  SlabMemory memory;
  const SlabPiece left = memory.Take(1'000, 2'090);
  if (PageFlags(left.data).find(" nh ") == std::string::npos) {
    GTEST_SKIP() << "the system does not tell: " << PageFlags(left.data);
  }
  const SlabPiece next = memory.Take(16'000, 10);  // has no room in the first block
  EXPECT_NE(left.block, next.block);
  EXPECT_NE(PageFlags(left.data).find(" hg "), std::string::npos) << PageFlags(left.data);
  EXPECT_NE(PageFlags(next.data).find(" nh "), std::string::npos) << "unfinished";
  memory.Clear();
  EXPECT_NE(PageFlags(next.data).find(" hg "), std::string::npos) << PageFlags(next.data);
  const SlabPiece full = memory.Take(64, MappedMemory::kHugePageBytes / 64);
  EXPECT_NE(PageFlags(full.data).find(" hg "), std::string::npos) << PageFlags(full.data);
}

TEST(RowSlabsTest, TheLongestRowHasASlabOfItsOwn) {
  SlabMemory memory;
  RowSlabs slabs(&memory);
  const uint32_t pool =
      slabs.FindOrAddPool({.dim = 65'536, .state_floats = 131'072, .has_scalar = true});
  for (uint64_t sign = 0; sign < 5; ++sign) {
    const uint32_t cell = slabs.Allocate(pool);
    ASSERT_NE(cell, RowSlabs::kNoCell);
    std::memset(slabs.values(cell), 1, size_t{196'608} * sizeof(float));
  }
  EXPECT_GE(slabs.memory_bytes(), 5u * 786'432);
}

}  // namespace
}  // namespace persia::store

// Rows of 16 bits an element, through the store: what is lost, what is not, and what they take.
#include "store/row_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "store/store_test_util.h"

namespace persia::store {
namespace {

constexpr RowDtype kNarrow[] = {RowDtype::kFloat16, RowDtype::kBfloat16};

std::unique_ptr<EmbeddingStore> MakeNarrow(RowDtype dtype, const TrainConfig& config = SgdConfig(),
                                           EmbeddingStore::Options options = {
                                               .capacity = 10'000, .num_internal_shards = 2}) {
  options.row_dtype = dtype;
  return MakeStore(options, config);
}

// The greatest error of rounding to nearest, of a number of size 1 or below.
double HalfUnit(RowDtype dtype) { return dtype == RowDtype::kFloat16 ? 0x1p-11 : 0x1p-8; }

std::vector<float> Normal(size_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(NarrowRowsTest, NamesAreOfTheThreeTypes) {
  EXPECT_EQ(RowDtypeOf("float32").value(), RowDtype::kFloat32);
  EXPECT_EQ(RowDtypeOf("float16").value(), RowDtype::kFloat16);
  EXPECT_EQ(RowDtypeOf("bfloat16").value(), RowDtype::kBfloat16);
  const Status status = RowDtypeOf("fp8").status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("row_dtype is 'fp8'; choose float32"), std::string::npos);
}

TEST(NarrowRowsTest, ATierRefusesThem) {
  const PoolDirectory directory;
  const auto store = EmbeddingStore::Open(
      {.capacity = 100, .num_internal_shards = 2, .row_dtype = RowDtype::kBfloat16},
      directory.Tier(10));
  EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(store.status().ToString().find("row_dtype"), std::string::npos);
}

// Initial values and rows that are set: the float32 ones, to nearest.
TEST(NarrowRowsTest, GivenValuesAreRoundedToNearest) {
  const auto wide = MakeStore({.capacity = 10'000, .num_internal_shards = 2});
  for (const RowDtype dtype : kNarrow) {
    const auto store = MakeNarrow(dtype);
    for (const uint32_t dim : {1u, 7u, 16u}) {
      const auto signs = Range(1000 * dim, 1000 * dim + 100);
      const auto expect_near = [&](const std::vector<float>& found,
                                   const std::vector<float>& given) {
        for (size_t i = 0; i < given.size(); ++i) {
          ASSERT_NEAR(found[i], given[i], HalfUnit(dtype) * std::abs(given[i]) + 0x1p-25);
        }
      };
      expect_near(Lookup(*store, signs, dim), Lookup(*wide, signs, dim));
      const auto rows = Normal(signs.size() * dim, dim);
      ASSERT_TRUE(SetRows(*store, signs, dim, rows).ok());
      expect_near(Peek(*store, signs, dim), rows);
      // What was read is what there is: set again, it stays.
      const auto read = Peek(*store, signs, dim);
      ASSERT_TRUE(SetRows(*store, signs, dim, read).ok());
      EXPECT_EQ(Peek(*store, signs, dim), read);
    }
  }
}

// A thousand updates that are each far below the type's unit. To nearest, none of them would count.
TEST(NarrowRowsTest, SmallUpdatesAddUp) {
  constexpr uint32_t kDim = 16;
  constexpr int kSteps = 1000;
  const auto signs = Range(0, 64);
  for (const RowDtype dtype : kNarrow) {
    TrainConfig config = SgdConfig(1.0f);
    config.weight_bound = 0.0f;
    const auto store = MakeNarrow(dtype, config);
    ASSERT_TRUE(SetRows(*store, signs, kDim, std::vector<float>(signs.size() * kDim, 1.0f)).ok());
    const auto unit = static_cast<float>(HalfUnit(dtype));
    std::vector<double> expected(signs.size() * kDim, 1.0);
    for (int step = 0; step < kSteps; ++step) {
      auto gradients = Normal(expected.size(), static_cast<uint32_t>(step), unit / 50);
      for (float& g : gradients) g -= unit / 50;  // the row grows
      Update(*store, signs, kDim, gradients);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] -= double{gradients[i]};
    }
    const auto rows = Peek(*store, signs, kDim);
    double error = 0, moved = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error += double{rows[i]} - expected[i];
      moved += expected[i] - 1.0;
    }
    EXPECT_LT(std::abs(error), 0.03 * moved) << "of all elements together";
  }
}

TEST(NarrowRowsTest, WeightsStayWithinTheirBound) {
  for (const RowDtype dtype : kNarrow) {
    for (const float bound : {0.01f, 0.3f, 10.0f}) {  // none of them is a number of the types
      TrainConfig config = SgdConfig(1.0f);
      config.weight_bound = bound;
      const auto store = MakeNarrow(dtype, config);
      const auto signs = Range(0, 100);
      Lookup(*store, signs, 8);
      for (uint32_t step = 0; step < 5; ++step) {
        Update(*store, signs, 8, Normal(800, step, 3 * bound));
        for (const float value : Peek(*store, signs, 8)) {
          ASSERT_LE(std::abs(value), bound);
        }
      }
    }
  }
}

TEST(NarrowRowsTest, BoundsAreTheGreatestNumbersNotAboveThem) {
  EXPECT_EQ(RowFormat(RowDtype::kFloat32).Bound(0.1f), 0.1f);
  for (const RowDtype dtype : kNarrow) {
    const RowFormat format(dtype);
    EXPECT_EQ(format.Bound(0.0f), 0.0f);
    EXPECT_EQ(format.Bound(0.5f), 0.5f);
    EXPECT_LT(format.Bound(0.1f), 0.1f + 1e-9f);
    EXPECT_GT(format.Bound(0.1f), 0.0992f);
    EXPECT_GT(format.Bound(1e-39f), 0.0f) << "a bound, still";
  }
  EXPECT_EQ(RowFormat(RowDtype::kFloat16).Bound(1e9f), 65504.0f);
}

// A row whose gradient is not finite is not rounded anew, nor are others disturbed by it.
TEST(NarrowRowsTest, NonfiniteGradientsLeaveRowsAsTheyAre) {
  for (const RowDtype dtype : kNarrow) {
    const auto store = MakeNarrow(dtype);
    const auto signs = Range(0, 50);
    const auto before = Lookup(*store, signs, 8);
    std::vector<float> gradients(400, 1.0f);
    gradients[8 * 30] = NAN;
    const UpdateReport report = Update(*store, signs, 8, gradients);
    EXPECT_EQ(report.num_nonfinite, 1u);
    const auto after = Peek(*store, signs, 8);
    for (size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i] == before[i], i / 8 == 30);
  }
}

TEST(NarrowRowsTest, RulesOfSizeSeeTheirValues) {
  for (const RowDtype dtype : kNarrow) {
    TrainConfig config = SgdConfig();
    config.min_norm = 0.5f;
    const auto store = MakeNarrow(dtype, config);
    std::vector<float> rows(2 * 8, 0.1f);
    std::fill(rows.begin() + 8, rows.end(), 0.25f);
    ASSERT_TRUE(SetRows(*store, {1, 2}, 8, rows).ok());
    EXPECT_EQ(store->RemoveSmallRows().value(), 1u);
    EXPECT_FALSE(Has(*store, 1, 8));
    EXPECT_TRUE(Has(*store, 2, 8));
  }
}

TEST(NarrowRowsTest, UpdatesAreCountedBehindThem) {
  for (const RowDtype dtype : kNarrow) {
    for (const uint32_t dim : {1u, 7u, 8u}) {
      TrainConfig config = SgdConfig();
      config.optimizer.kind = OptimizerKind::kAdagrad;
      const auto store = MakeNarrow(
          dtype, config, {.capacity = 100, .num_internal_shards = 1, .counts_updates = true});
      Lookup(*store, {1, 2}, dim);
      for (int i = 0; i < 3; ++i) Update(*store, {2}, dim, std::vector<float>(dim, 0.1f));
      std::vector<uint32_t> counts(2);
      const std::vector<uint64_t> signs = {1, 2};
      ASSERT_TRUE(store->NumUpdates(signs, counts).ok());
      EXPECT_EQ(counts, (std::vector<uint32_t>{0, 3}));
    }
  }
}

// Beside the same rows in float32: two bytes less an element, and not a byte more of anything.
TEST(NarrowRowsMemoryTest, EmbeddingsTakeHalfTheBytes) {
  constexpr uint64_t kRows = 100'000;
  const auto bytes_of = [](RowDtype dtype, OptimizerKind kind) {
    TrainConfig config;
    config.optimizer.kind = kind;
    const auto store =
        MakeNarrow(dtype, config, {.capacity = 1'000'000'000, .num_internal_shards = 4});
    for (uint64_t begin = 0; begin < kRows; begin += 1000) {
      Lookup(*store, Range(begin, begin + 1000), 32);
    }
    return static_cast<double>(store->stats().memory_bytes) / kRows;
  };
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kRowwiseAdagrad, OptimizerKind::kAdagrad}) {
    const double wide = bytes_of(RowDtype::kFloat32, kind);
    for (const RowDtype dtype : kNarrow) EXPECT_NEAR(wide - bytes_of(dtype, kind), 64, 8);
  }
}

}  // namespace
}  // namespace persia::store

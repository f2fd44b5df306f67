// The size an EmbeddingStore reports, what it really takes, and running out of memory.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <numeric>
#include <vector>

#include "store/embedding_store.h"
#include "store/resident_test_util.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

TEST(MemoryTest, PreallocatesNothingForCapacity) {
  auto store = MakeStore({.capacity = 1'000'000'000, .num_internal_shards = 16});
  EXPECT_LT(store->stats().memory_bytes, 100'000u);
}

TEST(StatsTest, TotalsAddUpAndClearEmptiesTheStore) {
  auto store = MakeStore({.capacity = 50, .num_internal_shards = 1});
  Lookup(*store, Range(0, 10), 4);
  Lookup(*store, Range(10, 60), 4);
  Lookup(*store, Range(0, 20), 4, LookupMode::kInference);
  Update(*store, Range(0, 20), 4, std::vector<float>(80, 0.5f));
  const StoreStats stats = store->stats();
  EXPECT_EQ(stats.num_rows, 50u);
  EXPECT_EQ(stats.lookups.num_inserted, 60u);
  EXPECT_EQ(stats.lookups.num_evicted, 10u);
  EXPECT_EQ(stats.lookups.num_missing, 70u);
  EXPECT_EQ(stats.updates.num_updated, 10u);
  EXPECT_EQ(stats.updates.num_missing, 10u);
  store->Clear();
  EXPECT_EQ(store->size(), 0u);
  EXPECT_EQ(store->stats().updates.num_updated, 10u) << "totals are since start";
  EXPECT_LT(store->stats().memory_bytes, 10'000u);
  EXPECT_TRUE(store->config().has_value());
  Lookup(*store, {1}, 4);
  EXPECT_EQ(store->size(), 1u);
}

TEST(MemoryTest, ReportedBytesAreResidentAndSmallBesideTheRows) {
  constexpr uint64_t kRows = 600'000;
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  auto store = MakeStore({.capacity = 100'000'000, .num_internal_shards = 1}, config);
  std::vector<uint64_t> signs(5000);
  std::vector<float> rows(signs.size() * 16);
  const RowBlock block = {.dim = 16, .signs = signs};
  const uint64_t before = ResidentBytes();
  for (uint64_t begin = 0; begin < kRows; begin += signs.size()) {
    std::iota(signs.begin(), signs.end(), begin);
    ASSERT_TRUE(store->Lookup({&block, 1}, LookupMode::kTrain, rows.data()).ok());
  }
  const auto reported = static_cast<double>(store->stats().memory_bytes);
  const double row_bytes = 2 * 16 * sizeof(float);
  const double slab_begun = 2 << 20;
  EXPECT_LE(reported, kRows * (row_bytes + 32) + slab_begun);
  if (kSanitized) return;
  EXPECT_NEAR(static_cast<double>(ResidentBytes() - before) / reported, 1.0, 0.05);
}

// Sizes a seventeenth apart, so that no phase of growth is missed.
TEST(MemoryTest, AnySizeCostsAtMost32BytesARowAndLessOnAverage) {
  constexpr uint64_t kRows = 3'000'000;
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kRowwiseAdagrad;
  auto store = MakeStore({.capacity = 1'000'000'000, .num_internal_shards = 16}, config);
  const double row_bytes = 8 * sizeof(float) + sizeof(uint32_t);
  std::vector<uint64_t> signs(1000);  // a call of this size needs few buffers beside the rows
  std::vector<float> rows(signs.size() * 8);
  const RowBlock block = {.dim = 8, .signs = signs};
  double sum = 0;
  int num_sizes = 0;
  for (uint64_t size = 0, judged = 100'000; size < kRows;) {
    std::iota(signs.begin(), signs.end(), size);
    ASSERT_TRUE(store->Lookup({&block, 1}, LookupMode::kTrain, rows.data()).ok());
    size += signs.size();
    if (size < judged) continue;
    judged += judged / 17;
    const auto bytes = static_cast<double>(store->stats().memory_bytes);
    const double extra = bytes / static_cast<double>(size) - row_bytes;
    EXPECT_LE(extra, 32) << size << " rows";
    sum += extra;
    ++num_sizes;
  }
  EXPECT_LE(sum / num_sizes, 27);
}

// In a process of its own: fills the store until the address space allowed runs out.
void FillUntilRefused() {
  auto store = MakeStore({.capacity = 1'000'000'000, .num_internal_shards = 1});
  const auto first = Range(0, 100);
  const auto expected = Lookup(*store, first, 1024);
  std::vector<float> rows(100 * 1024);
  std::vector<uint64_t> signs(100);
  const RowBlock block = {.dim = 1024, .signs = signs};
  const rlimit limit = {.rlim_cur = 256 << 20, .rlim_max = 256 << 20};
  setrlimit(RLIMIT_AS, &limit);
  Status status;
  for (uint64_t begin = 100; status.ok() && begin < 1'000'000; begin += signs.size()) {
    std::iota(signs.begin(), signs.end(), begin);
    status = store->Lookup({&block, 1}, LookupMode::kTrain, rows.data());
  }
  const bool refused = status.code() == StatusCode::kResourceExhausted;
  const bool rows_kept = Peek(*store, first, 1024) == expected;
  const bool still_trains = Update(*store, first, 1024, rows).num_updated == first.size();
  std::exit(refused && rows_kept && still_trains ? 0 : 1);
}

TEST(MemoryTest, RunningOutIsAnErrorAndKeepsTheRows) {
  if (kSanitized) GTEST_SKIP() << "sanitizers reserve more address space than the limit";
  EXPECT_EXIT(FillUntilRefused(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace persia::store

// InPlaceRows: the same rows as through EmbeddingStore's own calls, used where they lie.
#include "store/in_place_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <span>

#include "base/thread_pool.h"
#include "simd/kernels.h"
#include "store/store_test_util.h"

namespace persia::store {
namespace {

// One set of signs with the arrays that InPlaceRows fills.
struct Batch {
  Batch(std::vector<uint64_t> batch_signs, uint32_t dim) : signs(std::move(batch_signs)) {
    handles.resize(signs.size());
    values.resize(signs.size());
    rows = {dim, signs, handles, values};
  }
  std::vector<uint64_t> removals;
  std::vector<float> Values() const {
    std::vector<float> all;
    for (const float* row : values) all.insert(all.end(), row, row + rows.dim);
    return all;
  }

  std::vector<uint64_t> signs;
  std::vector<RowHandle> handles;
  std::vector<const float*> values;
  SignRows rows;
};

constexpr float kZeros[64] = {};

InPlaceRows Begin(EmbeddingStore& store, LookupMode mode = LookupMode::kTrain) {
  auto rows = InPlaceRows::Begin(store, mode);
  EXPECT_TRUE(rows.ok()) << rows.status().ToString();
  return std::move(rows).value();
}

// Finds, and inserts what is missing.
Status Train(EmbeddingStore& store, Batch& batch, LookupReport* report) {
  InPlaceRows rows = Begin(store);
  std::vector<uint32_t> missing;
  rows.Find(batch.rows, kZeros, &missing);
  std::map<uint32_t, std::vector<MissingRow>> by_shard;
  for (uint32_t index : missing) {
    const MissingRow row = {&batch.rows, index};
    by_shard[rows.ShardOf(row)].push_back(row);
  }
  for (const auto& [shard, list] : by_shard) {
    PERSIA_RETURN_IF_ERROR(rows.Insert(shard, list, report));
  }
  batch.removals = rows.Removals();
  return Status::Ok();
}

UpdateReport UpdateAll(EmbeddingStore& store, Batch& batch, const std::vector<float>& gradients) {
  std::vector<const float*> pointers;
  for (size_t i = 0; i < batch.signs.size(); ++i)
    pointers.push_back(&gradients[i * batch.rows.dim]);
  UpdateReport report;
  InPlaceRows rows = InPlaceRows::BeginUpdate(store, batch.removals);
  rows.Locate(batch.rows);
  rows.Update(batch.rows, pointers, &report);
  return report;
}

TEST(InPlaceRowsTest, ReadsAndUpdatesTheRowsThatTheOtherCallsSee) {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdam;
  auto store = MakeStore({.capacity = 10'000, .num_internal_shards = 7}, config);
  auto copying = MakeStore({.capacity = 10'000, .num_internal_shards = 3}, config);
  Batch batch(Range(0, 1000), 5);
  for (int step = 0; step < 3; ++step) {
    LookupReport report;
    ASSERT_TRUE(Train(*store, batch, &report).ok());
    EXPECT_EQ(report.num_inserted, step == 0 ? 1000u : 0u);
    EXPECT_EQ(batch.Values(), Lookup(*copying, batch.signs, 5));
    std::vector<float> gradients(5000);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i % 7) - 3.0f;
    EXPECT_EQ(UpdateAll(*store, batch, gradients).num_updated, 1000u);
    Update(*copying, batch.signs, 5, gradients);
    EXPECT_EQ(Peek(*store, batch.signs, 5), Peek(*copying, batch.signs, 5));
  }
}

TEST(InPlaceRowsTest, InferenceReadsZerosForWhatIsMissingAndChangesNothing) {
  auto store = MakeStore({.capacity = 100, .num_internal_shards = 2});
  Lookup(*store, {1}, 4);
  Batch batch({1, 2}, 4);
  RecentRows recent;
  recent.Begin(2, 0);
  Begin(*store, LookupMode::kInference).FindForReading(batch.rows, kZeros, &recent);
  EXPECT_EQ(batch.values[1], kZeros);
  EXPECT_EQ(batch.Values(), Peek(*store, {1, 2}, 4));
  EXPECT_EQ(store->size(), 1u);
}

uint32_t NumUpdates(const EmbeddingStore& store, uint64_t sign) {
  uint32_t count = 77;
  EXPECT_TRUE(store.NumUpdates(std::span(&sign, 1), std::span(&count, 1)).ok());
  return count;
}

TEST(InPlaceRowsTest, KernelsMakeTheKeysOfSigns) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> signs(300), keys(signs.size()), expected;
  for (uint64_t& sign : signs) sign = random() >> (random() % 64);
  for (const uint64_t sign : signs) expected.push_back(SignKey(sign));
  for (const auto isa :
       {simd::Isa::kScalar, simd::Isa::kAvx2, simd::Isa::kAvx512, simd::Isa::kNeon}) {
    const simd::Kernels* kernels = simd::KernelsFor(isa);
    if (kernels == nullptr) continue;
    // No multiple of a register's width.
    kernels->make_keys(keys.data(), signs.data(), 8);
    kernels->make_keys(keys.data() + 8, signs.data() + 8, signs.size() - 8);
    EXPECT_EQ(keys, expected) << kernels->name;
  }
}

// Few signs many times, of which some share a place among the recent rows; sign 0 has key 0, which
// is what an empty place has.
TEST(InPlaceRowsTest, ReadsSignsThatRepeat) {
  auto store = MakeStore({});
  std::vector<uint64_t> distinct(100);
  for (size_t i = 0; i < distinct.size(); ++i) distinct[i] = i * i;
  std::vector<float> embeddings(distinct.size() * 4);
  for (size_t i = 0; i < embeddings.size(); ++i) embeddings[i] = static_cast<float>(i + 1);
  const RowBlock block = {4, distinct};
  ASSERT_TRUE(store->SetRows({&block, 1}, embeddings.data()).ok());
  std::vector<uint64_t> signs;
  for (size_t i = 0; i < 3000; ++i) {
    signs.push_back(i % 7 == 6 ? 1'000'000 + i % 2 : distinct[i * 31 % distinct.size()]);
  }
  Batch batch(signs, 4);
  RecentRows recent;
  for (int lookup = 0; lookup < 20; ++lookup) {  // more places than rows in the end
    recent.Begin(16, 0);
    Begin(*store, LookupMode::kInference).FindForReading(batch.rows, kZeros, &recent);
    for (size_t i = 0; i < signs.size(); ++i) {
      const float* row = embeddings.data() + i * 31 % distinct.size() * 4;
      const float* expected = i % 7 == 6 ? kZeros : row;
      ASSERT_TRUE(std::equal(expected, expected + 4, batch.values[i])) << i;
    }
  }
}

// Two keys have the same place if they differ in higher bits only than the number of places has.
TEST(RecentRowsTest, OnlyLookupsOfManySignsGetMoreThan4096Places) {
  const auto grow = [](RecentRows* recent, size_t num_signs) {
    for (int lookup = 0; lookup < 20; ++lookup) {
      recent->Begin(num_signs, 0);
      recent->CountMisses(1 << 20);
    }
  };
  RecentRows recent;
  grow(&recent, 16'384);
  EXPECT_NE(&recent.Of(0), &recent.Of(2048));
  EXPECT_EQ(&recent.Of(0), &recent.Of(4096));
  grow(&recent, 1 << 20);
  EXPECT_NE(&recent.Of(0), &recent.Of(8192));
  EXPECT_EQ(&recent.Of(0), &recent.Of(16'384));
  grow(&recent, 16);  // fewer signs leave it as it is
  EXPECT_NE(&recent.Of(0), &recent.Of(8192));
}

// Of several shapes of rows: the count lies behind the state, which must not touch it.
TEST(InPlaceRowsTest, UpdatesAreCountedWithBothKindsOfCalls) {
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdam, OptimizerKind::kAdagrad,
                          OptimizerKind::kRowwiseAdagrad}) {
    for (const uint32_t dim : {1u, 4u, 16u, 33u}) {
      TrainConfig config;
      config.optimizer.kind = kind;
      auto store =
          MakeStore({.capacity = 1000, .num_internal_shards = 3, .counts_updates = true}, config);
      auto plain = MakeStore({.capacity = 1000, .num_internal_shards = 3}, config);
      Batch often(Range(0, 100), dim);
      Batch seldom(Range(50, 150), dim);
      const std::vector<float> gradients(100 * dim, 0.5f);
      for (int step = 0; step < 5; ++step) {
        for (auto* batch : {&often, &seldom}) {
          if (batch == &seldom && step > 0) continue;
          LookupReport report;
          ASSERT_TRUE(Train(*store, *batch, &report).ok());
          UpdateAll(*store, *batch, gradients);
          Lookup(*plain, batch->signs, dim);
          Update(*plain, batch->signs, dim, gradients);
        }
      }
      Update(*store, Range(149, 150), dim, std::vector<float>(dim));
      Update(*plain, Range(149, 150), dim, std::vector<float>(dim));
      EXPECT_EQ(NumUpdates(*store, 0), 5u);
      EXPECT_EQ(NumUpdates(*store, 99), 6u);
      EXPECT_EQ(NumUpdates(*store, 100), 1u);
      EXPECT_EQ(NumUpdates(*store, 149), 2u);
      EXPECT_EQ(NumUpdates(*store, 150), 0u);  // no row
      EXPECT_EQ(Peek(*store, Range(0, 150), dim), Peek(*plain, Range(0, 150), dim));
    }
  }
}

TEST(InPlaceRowsTest, CountsBeginAnewWithTheRow) {
  auto store = MakeStore({.capacity = 4, .num_internal_shards = 1, .counts_updates = true});
  Batch batch(Range(0, 4), 4);
  LookupReport report;
  ASSERT_TRUE(Train(*store, batch, &report).ok());
  std::vector<float> gradients(16, 1.0f);
  gradients[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(UpdateAll(*store, batch, gradients).num_nonfinite, 1u);
  EXPECT_EQ(NumUpdates(*store, 0), 1u);  // the batch came, whatever its gradient
  EXPECT_EQ(NumUpdates(*store, 3), 1u);
  ASSERT_TRUE(SetRows(*store, {3}, 4, {1, 2, 3, 4}).ok());
  EXPECT_EQ(NumUpdates(*store, 3), 0u);
  Lookup(*store, Range(100, 104), 4);  // evicts all and takes their cells
  EXPECT_EQ(NumUpdates(*store, 0), 0u);
  EXPECT_EQ(NumUpdates(*store, 100), 0u);
}

TEST(InPlaceRowsTest, AStoreThatDoesNotCountSaysSo) {
  auto store = MakeStore({.capacity = 4, .num_internal_shards = 1});
  const std::vector<uint64_t> signs = {1};
  std::vector<uint32_t> counts(1);
  const Status status = store->NumUpdates(signs, counts);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
  const PoolDirectory directory;
  const auto tiered = EmbeddingStore::Open(
      {.capacity = 100, .num_internal_shards = 1, .counts_updates = true}, directory.Tier(10));
  EXPECT_EQ(tiered.status().code(), StatusCode::kInvalidArgument);
}

TEST(InPlaceRowsTest, AHandleIsNotTrustedWhenItsRowHasGone) {
  auto store = MakeStore({.capacity = 10, .num_internal_shards = 1});
  Batch batch({1, 2, 3}, 4);
  LookupReport report;
  ASSERT_TRUE(Train(*store, batch, &report).ok());
  Lookup(*store, Range(100, 110), 4);  // evicts all three and takes their cells
  const std::vector<float> gradients(12, 1.0f);
  const auto others = Peek(*store, Range(100, 110), 4);
  EXPECT_EQ(UpdateAll(*store, batch, gradients).num_missing, 3u);
  EXPECT_EQ(Peek(*store, Range(100, 110), 4), others);

  Lookup(*store, {2}, 4);  // back, in another cell
  const UpdateReport updated = UpdateAll(*store, batch, gradients);
  EXPECT_EQ(updated.num_updated, 1u);
  EXPECT_EQ(updated.num_missing, 2u);

  store->Clear();
  EXPECT_EQ(UpdateAll(*store, batch, gradients).num_missing, 3u);
}

TEST(InPlaceRowsTest, ARowOfAnotherDimIsMadeAnew) {
  auto store = MakeStore({.capacity = 10, .num_internal_shards = 1});
  Lookup(*store, {1, 2}, 8);
  Batch batch({1, 3}, 4);
  LookupReport report;
  ASSERT_TRUE(Train(*store, batch, &report).ok());
  EXPECT_EQ(report.num_inserted, 2u);
  EXPECT_EQ(store->size(), 3u);
  EXPECT_FALSE(Has(*store, 1, 8));
  EXPECT_TRUE(Has(*store, 1, 4));
}

TEST(InPlaceRowsTest, SignsThatAreNotAdmittedReadZerosAndSkipTheirGradients) {
  TrainConfig config = SgdConfig();
  config.admit_probability = 0.5f;
  auto store = MakeStore({.capacity = 1000, .num_internal_shards = 4}, config);
  Batch batch(Range(0, 200), 4);
  LookupReport report;
  ASSERT_TRUE(Train(*store, batch, &report).ok());
  EXPECT_EQ(report.num_inserted + report.num_unadmitted, 200u);
  EXPECT_EQ(static_cast<size_t>(std::count(batch.values.begin(), batch.values.end(), kZeros)),
            report.num_unadmitted);
  const UpdateReport updated = UpdateAll(*store, batch, std::vector<float>(800, 1.0f));
  EXPECT_EQ(updated.num_updated, report.num_inserted);
  EXPECT_EQ(updated.num_missing, report.num_unadmitted);
}

TEST(InPlaceRowsTest, ABatchEvictsNoneOfItsOwnRows) {
  auto store = MakeStore({.capacity = 6, .num_internal_shards = 1});
  Lookup(*store, {1, 2, 3}, 4);
  Lookup(*store, {4, 5, 6}, 4);
  Batch batch({1, 7, 8}, 4);
  LookupReport report;
  ASSERT_TRUE(Train(*store, batch, &report).ok());
  EXPECT_EQ(report.num_evicted, 2u);
  for (uint64_t sign : {1, 4, 5, 6, 7, 8}) EXPECT_TRUE(Has(*store, sign)) << sign;
}

TEST(InPlaceRowsTest, ABatchThatDoesNotFitIsRefused) {
  auto store = MakeStore({.capacity = 6, .num_internal_shards = 1});
  Batch before(Range(0, 6), 4);
  LookupReport report;
  ASSERT_TRUE(Train(*store, before, &report).ok());
  Batch batch(Range(3, 10), 4);
  const Status status = Train(*store, batch, &report);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("raise the capacity"), std::string::npos);
  EXPECT_TRUE(Has(*store, 3)) << "rows of the batch itself stay";
  Batch next(Range(20, 26), 4);
  EXPECT_TRUE(Train(*store, next, &report).ok()) << "and the store goes on";
  EXPECT_EQ(store->size(), 6u);
}

TEST(InPlaceRowsTest, RefusesToTrainUnconfigured) {
  auto store = EmbeddingStore::Create({.capacity = 6, .num_internal_shards = 1});
  EXPECT_EQ(InPlaceRows::Begin(*store.value(), LookupMode::kTrain).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_TRUE(InPlaceRows::Begin(*store.value(), LookupMode::kInference).ok());
}

// Under ThreadSanitizer this shows that threads with signs of their own do not meet.
TEST(InPlaceRowsTest, ThreadsWorkOnSignsOfTheirOwn) {
  auto store = MakeStore({.capacity = 3000, .num_internal_shards = 5});
  ThreadPool pool(4);
  for (uint64_t step = 0; step < 20; ++step) {
    std::vector<Batch> batches;
    for (uint64_t part = 0; part < 8; ++part) {
      batches.emplace_back(Range(part * 100'000 + step * 30, part * 100'000 + step * 30 + 200), 4);
    }
    // Batches were moved into place: their spans must be those of where they are now.
    for (Batch& batch : batches) batch.rows = {4, batch.signs, batch.handles, batch.values};
    std::vector<std::vector<uint32_t>> missing(batches.size());
    InPlaceRows rows = Begin(*store);
    pool.For(batches.size(), [&](size_t i) { rows.Find(batches[i].rows, kZeros, &missing[i]); });
    std::vector<std::vector<MissingRow>> by_shard(rows.num_shards());
    for (size_t i = 0; i < batches.size(); ++i) {
      for (uint32_t index : missing[i]) {
        const MissingRow row = {&batches[i].rows, index};
        by_shard[rows.ShardOf(row)].push_back(row);
      }
    }
    std::vector<LookupReport> inserts(by_shard.size());
    pool.For(by_shard.size(), [&](size_t shard) {
      EXPECT_TRUE(rows.Insert(static_cast<uint32_t>(shard), by_shard[shard], &inserts[shard]).ok());
    });
    const std::vector<float> gradient(4, 1.0f);
    const std::vector<const float*> gradients(200, gradient.data());
    std::vector<UpdateReport> updates(batches.size());
    // Once trusting the handles, once looking for all rows again.
    const std::vector<uint64_t> now = rows.Removals();
    {
      const InPlaceRows done = std::move(rows);
    }
    for (const auto& removals : {now, std::vector<uint64_t>(now.size(), UINT64_MAX)}) {
      InPlaceRows update = InPlaceRows::BeginUpdate(*store, removals);
      pool.For(batches.size(), [&](size_t i) {
        update.Locate(batches[i].rows);
        update.Update(batches[i].rows, gradients, &updates[i]);
      });
    }
    for (const UpdateReport& update : updates) EXPECT_EQ(update.num_updated, 400u);
  }
  EXPECT_EQ(store->size(), 3000u);
}

}  // namespace
}  // namespace persia::store

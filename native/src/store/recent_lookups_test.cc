// Updates of remembered lookups: the same rows as of updates that search for them.
#include "store/recent_lookups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "store/store_load.h"
#include "store/store_snapshot.h"
#include "store/store_test_util.h"
#include "store/whole_rows.h"

namespace persia::store {
namespace {

constexpr uint32_t kDim = 4;
constexpr EmbeddingStore::Options kOptions = {.capacity = 1000, .num_internal_shards = 4};

std::unique_ptr<FoundRows> Found(const RowBlock& block) {
  auto rows = std::make_unique<FoundRows>();
  EXPECT_TRUE(rows->signs.Build({&block, 1}, 4).ok());
  rows->Begin(4);
  return rows;
}

TEST(RecentLookupsTest, TakesTheLookupOfTheSameSignsOnce) {
  const std::vector<uint64_t> signs = Range(0, 100), others = Range(1, 101);
  std::vector<uint64_t> swapped = signs;
  std::swap(swapped[30], swapped[31]);  // between those that are sampled
  const RowBlock block{kDim, signs}, other{kDim, others}, wider{kDim + 1, signs};
  const RowBlock other_order{kDim, swapped};
  RecentLookups lookups;
  lookups.Keep({&block, 1}, Found(block));
  EXPECT_EQ(lookups.Take({&other, 1}), nullptr);
  EXPECT_EQ(lookups.Take({&wider, 1}), nullptr);
  EXPECT_NE(lookups.Take({&block, 1}), nullptr);
  EXPECT_EQ(lookups.Take({&block, 1}), nullptr);
  lookups.Keep({&block, 1}, Found(block));
  EXPECT_EQ(lookups.Take({&other_order, 1}), nullptr);
}

// As EmbeddingStore::Lookup().
void Remember(RecentLookups* lookups, std::span<const RowBlock> blocks) {
  std::unique_ptr<FoundRows> rows = lookups->Begin();
  EXPECT_TRUE(rows->signs.Build(blocks, 4).ok());
  rows->Begin(4);
  for (uint32_t shard = 0; shard < 4; ++shard) rows->signs.RunsOf(shard);
  lookups->Keep(blocks, std::move(rows));
}

TEST(RecentLookupsTest, ForgetsTheOldestBeyondItsBytes) {
  const std::vector<uint64_t> signs = Range(0, 100'000);
  const RowBlock first{kDim, signs};
  RecentLookups lookups;
  Remember(&lookups, {&first, 1});
  for (uint64_t i = 1; i < 20; ++i) {
    const RowBlock block{kDim, std::span(signs).subspan(i)};
    Remember(&lookups, {&block, 1});
  }
  EXPECT_LE(lookups.memory_bytes(), RecentLookups::kMaxBytes);
  EXPECT_EQ(lookups.Take({&first, 1}), nullptr);
  const RowBlock last{kDim, std::span(signs).subspan(19)};
  EXPECT_NE(lookups.Take({&last, 1}), nullptr);
}

TEST(RecentLookupsTest, ALookupOfAsManyRowsAsBeforeAndAFewMoreIsKept) {
  const std::vector<uint64_t> signs = Range(0, 100'500);
  RecentLookups lookups;
  for (size_t num_rows = 100'000; num_rows <= signs.size(); num_rows += 100) {
    const RowBlock block{kDim, std::span(signs).first(num_rows)};
    Remember(&lookups, {&block, 1});
    std::unique_ptr<FoundRows> rows = lookups.Take({&block, 1});
    ASSERT_NE(rows, nullptr) << num_rows;
    lookups.End(std::move(rows));
  }
}

TEST(RecentLookupsTest, SmallLookupsAreFoundAfterLargeOnes) {
  // Too large to be kept, and of an eighth of the memory.
  for (const size_t num_rows : {RecentLookups::kMaxBytes / 24, RecentLookups::kMaxBytes / 256}) {
    const std::vector<uint64_t> signs = Range(0, num_rows + 12);
    RecentLookups lookups;
    const auto block = [&](size_t begin, size_t size) {
      return RowBlock{kDim, std::span(signs).subspan(begin, size)};
    };
    for (size_t i = 0; i < 12; ++i) {
      const RowBlock large = block(i, num_rows);
      Remember(&lookups, {&large, 1});
      EXPECT_LE(lookups.memory_bytes(), RecentLookups::kMaxBytes);
    }
    // Those of the first passes may be in memory of large ones.
    for (size_t pass = 0; pass < 3; ++pass) {
      for (size_t i = 0; i < 30; ++i) {
        const RowBlock small = block(i, 100);
        Remember(&lookups, {&small, 1});
      }
    }
    for (size_t i = 0; i < 30; ++i) {
      const RowBlock small = block(i, 100);
      EXPECT_NE(lookups.Take({&small, 1}), nullptr) << num_rows << " " << i;
    }
  }
}

// Blocks without rows, whose dims differ so that no two are like one, take memory, too.
TEST(RecentLookupsTest, BlocksWithoutRowsAreCounted) {
  const std::vector<uint64_t> signs = Range(0, 100);
  std::vector<RowBlock> blocks(100'000, {.dim = kDim, .signs = {}});
  for (size_t i = 1; i < blocks.size(); i += 2) blocks[i].dim = kDim + 1;
  RecentLookups lookups;
  for (uint64_t i = 0; i < 40; ++i) {
    blocks[0].signs = std::span(signs).subspan(i);
    Remember(&lookups, blocks);
    const uint64_t least = std::min<uint64_t>(i + 1, 10) * blocks.size() * 16;
    EXPECT_GE(lookups.memory_bytes(), least);
    EXPECT_LE(lookups.memory_bytes(), RecentLookups::kMaxBytes);
  }
}

TEST(RecentLookupsTest, ForgetsTheOldestOfMany) {
  const std::vector<uint64_t> signs = Range(0, 1000);
  RecentLookups lookups;
  const auto block = [&](size_t begin) { return RowBlock{kDim, std::span(signs).subspan(begin)}; };
  for (size_t i = 0; i < 200; ++i) {
    const RowBlock each = block(i);
    Remember(&lookups, {&each, 1});
  }
  const RowBlock old = block(200 - RecentLookups::kMaxKept - 1);
  EXPECT_EQ(lookups.Take({&old, 1}), nullptr);
  const RowBlock oldest = block(200 - RecentLookups::kMaxKept);
  EXPECT_NE(lookups.Take({&oldest, 1}), nullptr);
}

std::vector<float> Gradients(size_t num_rows) {
  std::vector<float> gradients(num_rows * kDim);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i) * 0.125f;
  return gradients;
}

// Of a request in two blocks, which is not that of the lookup: it searches.
UpdateReport UpdateInTwo(EmbeddingStore& store, const std::vector<uint64_t>& signs,
                         const std::vector<float>& gradients) {
  UpdateReport report;
  const auto all = std::span(signs);
  const RowBlock blocks[] = {{kDim, all.first(1)}, {kDim, all.subspan(1)}};
  EXPECT_TRUE(store.Update(blocks, gradients.data(), &report).ok());
  return report;
}

// Looks signs up in two stores, calls `between` for each, and updates the one by what it remembers
// and the other by a search.
void ExpectSameUpdate(const TrainConfig& config, const EmbeddingStore::Options& options,
                      const std::function<void(EmbeddingStore&)>& between,
                      const std::vector<uint64_t>& signs = Range(100, 150)) {
  const std::vector<float> gradients = Gradients(signs.size());
  const auto remembers = MakeStore(options, config), searches = MakeStore(options, config);
  for (EmbeddingStore* store : {remembers.get(), searches.get()}) {
    Update(*store, {1}, kDim, Gradients(1));  // before it, a store remembers nothing
    Lookup(*store, signs, kDim);
    between(*store);
  }
  const UpdateReport expected = UpdateInTwo(*searches, signs, gradients);
  const UpdateReport report = Update(*remembers, signs, kDim, gradients);
  EXPECT_EQ(report.num_updated, expected.num_updated);
  EXPECT_EQ(report.num_missing, expected.num_missing);
  const std::vector<uint64_t> all = Range(0, 1200);
  EXPECT_EQ(Peek(*remembers, all, kDim), Peek(*searches, all, kDim));
}

TrainConfig Adagrad() {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  return config;
}

TEST(RecentLookupsTest, AnUpdateOfARememberedLookupHasTheSameRows) {
  for (const TrainConfig& config : {SgdConfig(), Adagrad()}) {
    ExpectSameUpdate(config, kOptions, [](EmbeddingStore&) {});
    ExpectSameUpdate(config,
                     {.capacity = 1000, .num_internal_shards = 4, .counts_updates = !IsOverATier()},
                     [](EmbeddingStore&) {});
  }
}

TEST(RecentLookupsTest, RowsThatWereInsertedSinceChangeNothing) {
  ExpectSameUpdate(SgdConfig(), kOptions,
                   [](EmbeddingStore& store) { Lookup(store, Range(200, 900), kDim); });
}

TEST(RecentLookupsTest, RowsThatWereEvictedSinceAreMissing) {
  ExpectSameUpdate(SgdConfig(), {.capacity = 64, .num_internal_shards = 4},
                   [](EmbeddingStore& store) { Lookup(store, Range(200, 232), kDim); });
}

TEST(RecentLookupsTest, RowsThatWereClearedOrReplacedSinceAreSearched) {
  ExpectSameUpdate(SgdConfig(), kOptions, [](EmbeddingStore& store) { store.Clear(); });
  ExpectSameUpdate(SgdConfig(), kOptions, [](EmbeddingStore& store) {
    store.Clear();
    Lookup(store, Range(120, 220), kDim);
  });
  ExpectSameUpdate(SgdConfig(), kOptions, [](EmbeddingStore& store) {
    Lookup(store, Range(110, 120), kDim + 4);  // rows of another dim take their place
  });
}

TEST(RecentLookupsTest, ALookupThatEvictsItsOwnRowsIsNotUsed) {
  ExpectSameUpdate(SgdConfig(), {.capacity = 16, .num_internal_shards = 4}, [](EmbeddingStore&) {});
}

TEST(RecentLookupsTest, RowsThatWereNotAdmittedMayBeSince) {
  TrainConfig config = SgdConfig();
  config.admit_after = 2;
  ExpectSameUpdate(config, kOptions,
                   [](EmbeddingStore& store) { Lookup(store, Range(100, 125), kDim); });
}

TEST(RecentLookupsTest, RowsThatHaveExpiredSinceAreMissing) {
  TrainConfig config = SgdConfig();
  config.time_to_live_sec = 0.01f;
  ExpectSameUpdate(config, kOptions, [](EmbeddingStore& store) {
    const auto is_left = [&](uint64_t sign) { return Has(store, sign); };
    const std::vector<uint64_t> signs = Range(100, 150);
    // Not by lookups: so many would displace the one that is remembered.
    const std::vector<float> rows(32 * kDim, 2.0f);
    while (std::ranges::any_of(signs, is_left)) {
      EXPECT_TRUE(SetRows(store, Range(900, 932), kDim, rows).ok());
    }
  });
}

TEST(RecentLookupsTest, RowsThatAPacketRemovedSinceAreMissing) {
  const std::vector<uint64_t> removed = Range(100, 120), loaded = Range(110, 140);
  const std::vector<uint32_t> ages(loaded.size(), 0);
  const std::vector<float> embeddings(loaded.size() * kDim, 3.0f);
  const auto apply = [](EmbeddingStore& store, const Changes& changes) {
    auto load = StoreLoad::Begin(store);
    ASSERT_TRUE(load.ok());
    ASSERT_TRUE((*load)->Apply(changes).ok());
  };
  ExpectSameUpdate(SgdConfig(), kOptions, [&](EmbeddingStore& store) {
    apply(store, {.removals = {removed}, .rows = {}});
  });
  ExpectSameUpdate(SgdConfig(), kOptions, [&](EmbeddingStore& store) {
    apply(store, {.removals = {removed}, .rows = {}});
    // Rows in the places of those.
    apply(
        store,
        {.removals = {},
         .rows = {{.dim = kDim, .signs = loaded, .ages = ages, .embeddings = embeddings.data()}}});
  });
}

TEST(RecentLookupsTest, RowsInArraysAreUpdatedAndCleared) {
  if (IsOverATier()) GTEST_SKIP() << "a tier has no arrays";
  EmbeddingStore::Options options = kOptions;
  options.arrays = {{.first_sign = 0, .num_ids = 130, .dim = kDim}};
  ExpectSameUpdate(SgdConfig(), options, [](EmbeddingStore&) {});
  ExpectSameUpdate(SgdConfig(), options, [](EmbeddingStore& store) {
    store.Clear();
    Lookup(store, Range(120, 220), kDim);
  });
}

TEST(RecentLookupsTest, ASignMayBeNamedTwice) {
  std::vector<uint64_t> signs = Range(100, 150);
  signs[21] = signs[20];
  signs[49] = signs[10];
  ExpectSameUpdate(Adagrad(), kOptions, [](EmbeddingStore&) {}, signs);
}

TEST(RecentLookupsTest, AnUpdateUsesTheCellsOfItsLookup) {
  if (IsOverATier()) GTEST_SKIP() << "rows of a tier move";
  const auto store = MakeStore({.capacity = 100, .num_internal_shards = 1});
  Shard& shard = store->shards().all()[0];
  const std::vector<uint64_t> signs = {1, 2};
  const RowBlock block{kDim, signs};
  FoundRows found;
  ASSERT_TRUE(found.signs.Build({&block, 1}, 1).ok());
  found.Begin(1);
  std::vector<float> rows(signs.size() * kDim);
  LookupReport looked_up;
  ASSERT_TRUE(shard
                  .Lookup(found.signs.RunsOf(0), LookupMode::kTrain, rows.data(), &looked_up,
                          &found.cells_by_shard[0])
                  .ok());
  std::swap(found.cells[0], found.cells[1]);  // shows which ones it uses
  const std::vector<float> gradients = Gradients(signs.size());
  UpdateReport updated;
  ASSERT_TRUE(
      shard.Update(found.signs.RunsOf(0), gradients.data(), &updated, &found.cells_by_shard[0])
          .ok());
  const std::vector<float> after = Peek(*store, signs, kDim);
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_FLOAT_EQ(after[i], rows[i] - gradients[(i + kDim) % gradients.size()]);
  }
}

TEST(RecentLookupsTest, AStoreTakesEachLookupThatItRemembers) {
  if (IsOverATier()) GTEST_SKIP() << "a store over a tier remembers none";
  const std::vector<uint64_t> signs = Range(0, 100);
  const std::vector<float> gradients = Gradients(signs.size());
  const auto store = MakeStore(kOptions);
  Lookup(*store, signs, kDim);
  Update(*store, signs, kDim, gradients);
  const uint64_t before = store->stats().memory_bytes;
  Lookup(*store, signs, kDim);
  EXPECT_GT(store->stats().memory_bytes, before);
  Update(*store, signs, kDim, gradients);
  const uint64_t once = store->stats().memory_bytes;
  for (int i = 0; i < 3; ++i) {  // a lookup that is not taken keeps its memory
    Lookup(*store, signs, kDim);
    EXPECT_EQ(store->stats().memory_bytes, once);
    Update(*store, signs, kDim, gradients);
  }
}

TEST(RecentLookupsTest, LookupsOfWholeRowsAreNotRemembered) {
  if (IsOverATier()) GTEST_SKIP() << "a store over a tier has no whole rows";
  const std::vector<uint64_t> signs = Range(0, 100);
  const RowBlock block{kDim, signs};
  const auto store = MakeStore(kOptions);
  Lookup(*store, signs, kDim);
  Update(*store, signs, kDim, Gradients(signs.size()));
  const uint64_t before = store->stats().memory_bytes;
  LookupReport report;
  ASSERT_TRUE(LookupWholeRows({&block, 1}, store.get(), &report).ok());
  EXPECT_EQ(store->stats().memory_bytes, before);
}

TEST(RecentLookupsTest, ASnapshotHasTheRowsBeforeTheUpdate) {
  const std::vector<uint64_t> signs = Range(100, 150);
  const auto store = MakeStore(kOptions);
  Update(*store, {1}, kDim, Gradients(1));
  const std::vector<float> before = Lookup(*store, signs, kDim);
  auto snapshot = StoreSnapshot::Begin(*store, {});
  ASSERT_TRUE(snapshot.ok());
  Update(*store, signs, kDim, Gradients(signs.size()));
  EXPECT_NE(Peek(*store, signs, kDim), before);
  std::vector<float> saved(before.size());
  const auto add = [&](const RowRecords& records) {
    records.ForEach([&](const RowHead& head, const float* values) {
      if (head.sign < signs.front()) return;
      std::copy_n(values, kDim, &saved[(head.sign - signs.front()) * kDim]);
    });
  };
  StoreSnapshot::Batch batch;
  for (uint32_t shard = 0; shard < (*snapshot)->num_shards(); ++shard) {
    for (bool has_more = true; has_more;) {
      has_more = (*snapshot)->Read(shard, 16, &batch).value();
      add(batch.read);
      for (const RowRecords& rows : batch.saved) add(rows);
    }
  }
  EXPECT_EQ(saved, before);
}

}  // namespace
}  // namespace persia::store

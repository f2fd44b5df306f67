// EmbeddingBags: which rows it keeps while batches are in flight, what it refuses, and calls from
// several threads.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "client/embedding_bags_test_util.h"

namespace persia::client {
namespace {

// --- eviction ---

// Random traffic on one shard: those that went are never newer than those that stayed.
TEST(EmbeddingBagsTest, EvictsWhatWasUsedTheLongestAgo) {
  constexpr uint64_t kCapacity = 40, kNumIds = 100;
  TrainConfig config = Sgd();
  config.initializer = {.lower = 1.0f, .upper = 2.0f, .seed = 1};  // a row is never zero
  const auto bags = Make(Options(OneSlot(), 2, kCapacity, 1), config);
  std::mt19937 rng(23);
  std::vector<size_t> last_use(kNumIds, 0);
  SlotIds all;
  for (uint64_t id = 0; id < kNumIds; ++id) all.push_back({id});
  for (size_t step = 1; step <= 200; ++step) {
    SlotIds batch(1 + rng() % kCapacity);
    for (auto& ids : batch) {
      ids = {rng() % kNumIds};
      last_use[ids[0]] = step;
    }
    for (const float value : Values(Train(*bags, {batch}))) ASSERT_NE(value, 0.0f);
    const auto rows = Infer(*bags, {all});
    size_t newest_gone = 0, oldest_left = step;
    for (size_t id = 0; id < kNumIds; ++id) {
      if (last_use[id] == 0) continue;
      if (rows[id] == 0.0f) {
        newest_gone = std::max(newest_gone, last_use[id]);
      } else {
        oldest_left = std::min(oldest_left, last_use[id]);
      }
    }
    ASSERT_LE(newest_gone, oldest_left) << "step " << step;
    ASSERT_LE(bags->stats().num_rows, kCapacity);
  }
  EXPECT_GT(bags->stats().lookups.num_evicted, kCapacity);
}

TEST(EmbeddingBagsTest, GradientsOfEvictedRowsAreDroppedAndCounted) {
  const auto bags = Make(Options(OneSlot(), 1, 4, 1), SgdFromZero());
  const PooledBags old = Train(*bags, {{{1}, {2}, {3}}});
  Train(*bags, {{{10}, {11}, {12}}});  // evicts two of the three
  const UpdateReport report = Must(bags->Update(*old.batch, std::vector<float>{1, 1, 1}));
  EXPECT_EQ(report.num_updated, 1u);
  EXPECT_EQ(report.num_missing, 2u);
  const auto rows = Infer(*bags, {{{1}, {2}, {3}, {10}, {11}, {12}}});
  EXPECT_EQ(std::count(rows.begin(), rows.begin() + 3, -1.0f), 1);
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 0.0f), 5);  // the memory's new rows: untouched
}

// An evicted row that came back is another one at another place; the gradient finds it.
TEST(EmbeddingBagsTest, GradientsFindRowsThatCameBack) {
  const auto bags = Make(Options(OneSlot(), 1, 2, 1), SgdFromZero());
  const PooledBags first = Train(*bags, {{{1}, {2}}});
  Train(*bags, {{{3}, {4}}});
  Train(*bags, {{{2}, {1}}});
  const UpdateReport report = Must(bags->Update(*first.batch, std::vector<float>{1, 2}));
  EXPECT_EQ(report.num_updated, 2u);
  EXPECT_EQ(Infer(*bags, {{{1}, {2}}}), (std::vector<float>{-1, -2}));
}

TEST(EmbeddingBagsTest, ABatchAboveTheCapacityIsRefusedAndTheNextOneWorks) {
  const auto bags = Make(Options(OneSlot(), 1, 4, 1), SgdFromZero());
  const PooledBags before = Train(*bags, {{{1}, {2}}});
  const FlatBatch large = Flatten({{{1}, {2}, {3}, {4}, {5}}});
  const auto refused = bags->Lookup(large.values, large.lengths, LookupMode::kTrain);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().message().find("capacity"), std::string::npos);
  EXPECT_LE(bags->stats().num_rows, 4u);
  for (uint64_t step = 0; step < 10; ++step) {  // all of the capacity can be used, again and again
    const uint64_t id = 100 + 4 * step;
    const PooledBags next = Train(*bags, {{{id}, {id + 1}, {id + 2}, {id + 3}}});
    EXPECT_EQ(Must(bags->Update(*next.batch, std::vector<float>{1, 1, 1, 1})).num_updated, 4u);
  }
  EXPECT_EQ(bags->stats().num_rows, 4u);
  EXPECT_EQ(Must(bags->Update(*before.batch, std::vector<float>{1, 1})).num_missing, 2u);
}

// --- batches in flight ---

TEST(EmbeddingBagsTest, BatchesInFlightAreUpdatedInAnyOrderOrNotAtAll) {
  constexpr size_t kNumBatches = 12;  // more than are kept for reuse
  const auto bags = Make(Options(OneSlot()), SgdFromZero());
  std::mt19937 rng(29);
  std::vector<float> expected(20, 0.0f);
  for (size_t round = 0; round < 20; ++round) {
    std::vector<std::tuple<SlotIds, PooledBags>> in_flight;
    for (size_t b = 0; b < kNumBatches; ++b) {
      SlotIds samples(1 + rng() % 50);
      for (auto& ids : samples) {
        ids.resize(rng() % 4);
        for (uint64_t& id : ids) id = rng() % expected.size();
      }
      PooledBags pooled = Train(*bags, {samples});
      in_flight.emplace_back(std::move(samples), std::move(pooled));
    }
    std::shuffle(in_flight.begin(), in_flight.end(), rng);
    in_flight.resize(kNumBatches - 3);  // three are dropped without a gradient
    for (auto& [samples, pooled] : in_flight) {
      Must(bags->Update(*pooled.batch, std::vector<float>(samples.size(), 0.25f)));
      for (const auto& ids : samples) {
        for (const uint64_t id : ids) expected[id] -= 0.25f;
      }
    }
  }
  SlotIds all;
  for (uint64_t id = 0; id < expected.size(); ++id) all.push_back({id});
  EXPECT_EQ(Infer(*bags, {all}), expected);
}

TEST(EmbeddingBagsTest, ABatchIsUpdatedOnce) {
  const auto bags = Make(Options(OneSlot()), SgdFromZero());
  const PooledBags pooled = Train(*bags, {{{1}, {1}}});
  const std::vector<float> gradient = {1, 2};
  ASSERT_TRUE(bags->Update(*pooled.batch, gradient).ok());
  EXPECT_EQ(bags->Update(*pooled.batch, gradient).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Infer(*bags, {{{1}}}), std::vector<float>{-3});
}

TEST(EmbeddingBagsTest, AGradientOfTheWrongSizeLeavesTheBatchAsItWas) {
  const auto bags = Make(Options(OneSlot()), SgdFromZero());
  const PooledBags pooled = Train(*bags, {{{1}, {1}}});
  for (const size_t size : {0u, 1u, 3u}) {
    const auto refused = bags->Update(*pooled.batch, std::vector<float>(size, 1.0f));
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.status().message().find("2 x 1"), std::string::npos);
  }
  EXPECT_EQ(Must(bags->Update(*pooled.batch, std::vector<float>{1, 1})).num_updated, 1u);
}

TEST(EmbeddingBagsTest, RowsThatWereClearedMeanwhileAreMissing) {
  const auto bags = Make(Options(MixedSlots(), 2), Sgd());
  std::mt19937 rng(31);
  const auto batch = RandomBatch(rng, MixedSlots().size(), 20);
  const PooledBags pooled = Train(*bags, batch);
  const uint64_t num_rows = bags->stats().num_rows;
  bags->Clear();
  EXPECT_EQ(bags->stats().num_rows, 0u);
  const std::vector<float> gradient(20 * bags->num_columns(), 1.0f);
  const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
  EXPECT_EQ(report.num_missing, num_rows);
  EXPECT_EQ(report.num_updated, 0u);
  EXPECT_TRUE(SameBits(Values(Train(*bags, batch)), Values(pooled)));  // rows begin as they did
}

// --- what cannot be used ---

TEST(EmbeddingBagsTest, RowsWithNonfiniteGradientsAreLeftAloneAndCounted) {
  // The second slot has a bag of two, so that both ways of summing are taken.
  const std::vector<SlotConfig> slots = {{.name = "narrow", .dim = 2, .group = 0},
                                         {.name = "multi", .dim = 2, .group = 1}};
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kMax = std::numeric_limits<float>::max();
  const auto bags = Make(Options(slots), SgdFromZero());
  const std::vector<SlotIds> batch = {{{1}, {2}, {3}, {3}, {4}}, {{1}, {2, 3}, {4}, {5}, {5}}};
  const PooledBags pooled = Train(*bags, batch);
  const std::vector<float> gradient = {
      1,    2, 1,    2,     // ID 1; ID 1
      kNan, 0, kInf, 0,     // ID 2; IDs 2 and 3
      kMax, 0, 1,    1,     // ID 3, twice: the sum overflows; ID 4
      kMax, 0, 0,    kInf,  // ID 5, twice: infinity and its opposite
      1,    2, 0,    -kInf,
  };
  const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
  EXPECT_EQ(report.num_nonfinite, 5u);  // IDs 2, 3; IDs 2, 3, 5
  EXPECT_EQ(report.num_updated, 4u);    // IDs 1, 4; IDs 1, 4
  EXPECT_EQ(report.num_missing, 0u);
  EXPECT_EQ(Infer(*bags, batch), (std::vector<float>{-1, -2, -1, -2, 0, 0, 0,  0,  0, 0,
                                                     -1, -1, 0,  0,  0, 0, -1, -2, 0, 0}));
  EXPECT_EQ(bags->stats().updates.num_nonfinite, 5u);
}

void ExpectRefused(EmbeddingBags& bags, const std::vector<uint64_t>& values,
                   const std::vector<int64_t>& lengths, const std::string& named) {
  SCOPED_TRACE(named);
  for (const LookupMode mode : {LookupMode::kTrain, LookupMode::kInference}) {
    const auto refused = bags.Lookup(values, lengths, mode);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.status().message().find(named), std::string::npos)
        << refused.status().message();
  }
  EXPECT_EQ(bags.stats().num_rows, 0u);
}

TEST(EmbeddingBagsTest, LengthsThatDoNotFitAreRefusedByName) {
  const auto bags = Make(
      Options({{.name = "user", .dim = 4, .group = 0}, {.name = "item", .dim = 4, .group = 1}}),
      Sgd());
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  ExpectRefused(*bags, {1, 2}, {1, 1, 0}, "2 slots");
  ExpectRefused(*bags, {1, 2}, {1, 0, 0, -1}, "slot 'item': the length of sample 1 is -1");
  ExpectRefused(*bags, {1, 2}, {-1, 3, 0, 0}, "slot 'user': the length of sample 0 is -1");
  ExpectRefused(*bags, {1, 2}, {1, 1, kMin, 0}, "slot 'item': the length of sample 0");
  ExpectRefused(*bags, {1, 2}, {1, 0, 0, 0}, "lengths add up to 1");
  ExpectRefused(*bags, {}, {0, 0, 0, 1}, "slot 'item': lengths add up to more");
  ExpectRefused(*bags, {1, 2}, {2, 1, 0, 0}, "slot 'user': lengths add up to more");
  // Sums that wrap around to the number of values, or below it.
  ExpectRefused(*bags, {1, 2}, {kMax, kMax, 0, 0}, "slot 'user'");
  ExpectRefused(*bags, {1, 2}, {kMax, kMin, 1, 2}, "slot 'user'");
  ExpectRefused(*bags, {1, 2}, {1, 0, kMax, kMax}, "slot 'item'");
  ExpectRefused(*bags, {1, 2}, {int64_t{1} << 32, 0, 1, 1}, "slot 'user'");
  EXPECT_TRUE(bags->Lookup(std::vector<uint64_t>{1, 2}, std::vector<int64_t>{1, 0, 0, 1},
                           LookupMode::kTrain)
                  .ok());
}

TEST(EmbeddingBagsTest, RefusesWhatSlotsAndStoreRefuse) {
  const auto code = [](EmbeddingBagsOptions options) {
    return EmbeddingBags::Create(std::move(options)).status().code();
  };
  EXPECT_EQ(code(Options({})), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options(OneSlot(), 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options(OneSlot(), 1, 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options(OneSlot(), 1, 10, 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options({{.name = "wide", .dim = 65537}})), StatusCode::kInvalidArgument);
  const auto raw =
      EmbeddingBags::Create(Options({{.name = "seq", .dim = 4, .embedding_summation = false}}));
  EXPECT_EQ(raw.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(raw.status().message().find("'seq'"), std::string::npos);
}

TEST(EmbeddingBagsTest, TrainingNeedsAConfiguration) {
  const auto bags = Must(EmbeddingBags::Create(Options(OneSlot())));
  const FlatBatch batch = Flatten({{{1}}});
  EXPECT_EQ(bags->Lookup(batch.values, batch.lengths, LookupMode::kTrain).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(Infer(*bags, {{{1}}}), std::vector<float>{0});
}

TEST(EmbeddingBagsTest, RowsAreSetByIdOfTheirSlot) {
  const auto bags = Make(Options(MixedSlots()), Sgd());
  constexpr uint32_t kShared = 3, kStack = 7;  // positions of "shared_a" and "stack"
  const std::vector<uint64_t> ids = {5, 6};
  std::vector<float> rows(2 * 16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  ASSERT_TRUE(bags->SetRows(kShared, ids, rows).ok());
  std::vector<SlotIds> batch(MixedSlots().size(), SlotIds(2));
  batch[kShared] = {{5}, {6}};
  batch[5] = {{6}, {}};  // "shared_b" has the same rows
  const auto found = Infer(*bags, batch);
  EXPECT_EQ(Columns(found, bags->num_columns(), 8 + 1 + 3, 16), rows);
  EXPECT_EQ(found[8 + 1 + 3 + 16 + 16 + 2], 18.0f);
  for (const Status& refused :
       {bags->SetRows(kShared, ids, std::vector<float>(31)), bags->SetRows(kStack, ids, rows)}) {
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  }
}

// --- threads of the caller ---

// Gradients of 1/8 from a row of zeros: their sum is exact in any order.
TEST(EmbeddingBagsTest, ConcurrentCallsLoseNothing) {
  constexpr uint64_t kNumIds = 50;
  constexpr size_t kNumCallers = 4, kNumSteps = 60;
  const std::vector<SlotConfig> slots = {{.name = "a", .dim = 1, .group = 0},
                                         {.name = "b", .dim = 1, .group = 1}};
  const auto bags = Make(Options(slots, 3), SgdFromZero());
  std::vector<std::vector<float>> sums(kNumCallers, std::vector<float>(2 * kNumIds, 0.0f));
  std::vector<uint64_t> num_updated(kNumCallers, 0);
  const auto call = [&](size_t caller) {
    std::mt19937 rng(static_cast<uint32_t>(caller));
    for (size_t step = 0; step < kNumSteps; ++step) {
      std::vector<SlotIds> batch(2, SlotIds(1 + rng() % 30));
      for (size_t s = 0; s < 2; ++s) {
        for (auto& ids : batch[s]) {
          ids.resize(step % 2 == 0 ? 1 : rng() % 4);
          for (uint64_t& id : ids) {
            id = rng() % kNumIds;
            sums[caller][s * kNumIds + id] -= 0.125f;
          }
        }
      }
      const PooledBags pooled = Train(*bags, batch);
      const std::vector<float> gradient(2 * batch[0].size(), 0.125f);
      num_updated[caller] += Must(bags->Update(*pooled.batch, gradient)).num_updated;
      Infer(*bags, batch);
      EXPECT_LE(bags->stats().num_rows, 2 * kNumIds);
    }
  };
  std::vector<std::thread> callers;
  for (size_t c = 0; c < kNumCallers; ++c) callers.emplace_back(call, c);
  for (std::thread& caller : callers) caller.join();
  uint64_t total_updated = 0;
  std::vector<SlotIds> all(2);
  std::vector<float> expected(2 * kNumIds, 0.0f);  // by sample, then slot
  for (size_t c = 0; c < kNumCallers; ++c) {
    total_updated += num_updated[c];
    for (size_t i = 0; i < 2 * kNumIds; ++i) {
      expected[i % kNumIds * 2 + i / kNumIds] += sums[c][i];
    }
  }
  for (uint64_t id = 0; id < kNumIds; ++id) {
    all[0].push_back({id});
    all[1].push_back({id});
  }
  EXPECT_EQ(Infer(*bags, all), expected);
  EXPECT_EQ(bags->stats().updates.num_updated, total_updated);
}

// Everything that removes, moves or replaces rows, beside training. What is left is not
// foreseeable; that nothing breaks, hangs or races is what the sanitizers see.
TEST(EmbeddingBagsTest, TrainingEvictingClearingAndSettingAtOnce) {
  const std::vector<SlotConfig> slots = {{.name = "a", .dim = 4, .group = 0},
                                         {.name = "b", .dim = 40, .group = 1}};
  const auto bags = Make(Options(slots, 2, 300, 4), Sgd());
  const auto train = [&](uint32_t seed) {
    std::mt19937 rng(seed);
    for (size_t step = 0; step < 60; ++step) {
      std::vector<SlotIds> batch(2, SlotIds(20));
      for (SlotIds& samples : batch) {
        for (auto& ids : samples) ids = {rng() % 400};
      }
      const PooledBags pooled = Train(*bags, batch);
      const std::vector<float> gradient(20 * bags->num_columns(), 0.1f);
      const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
      EXPECT_LE(report.num_updated + report.num_missing, 40u);
      EXPECT_EQ(report.num_nonfinite, 0u);
    }
  };
  const auto disturb = [&] {
    const std::vector<uint64_t> ids = {1, 2, 3};
    const std::vector<float> rows(3 * 4, 0.5f);
    for (size_t step = 0; step < 60; ++step) {
      EXPECT_TRUE(bags->SetRows(0, ids, rows).ok());
      EXPECT_TRUE(bags->Configure(Sgd(step % 2 == 0 ? 0.1f : 0.2f), true).ok());
      EXPECT_LE(bags->stats().num_rows, 300u);
      if (step % 20 == 0) bags->Clear();
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 3; ++seed) threads.emplace_back(train, seed);
  threads.emplace_back(disturb);
  for (std::thread& thread : threads) thread.join();
}

// No ID of the batch has a row: all older rows go, and that is still not enough.
TEST(EmbeddingBagsTest, ABatchOfNewIdsAboveTheCapacityIsRefused) {
  for (const SlotIds& seen : {SlotIds{}, SlotIds{{1}, {2}}}) {
    const auto bags = Make(Options(OneSlot(), 1, 4, 1), SgdFromZero());
    Train(*bags, {seen});
    const FlatBatch large = Flatten({{{10}, {11}, {12}, {13}, {14}}});
    const auto refused = bags->Lookup(large.values, large.lengths, LookupMode::kTrain);
    EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
    EXPECT_EQ(bags->stats().num_rows,
              seen.size());  // "nothing is inserted"; better: nothing evicted
  }
}

TEST(EmbeddingBagsTest, RowsThatAreNotFiniteCannotBeSet) {  // EmbeddedClient refuses them
  const auto bags = Make(Options(OneSlot()), Sgd());
  const std::vector<uint64_t> ids = {1};
  const std::vector<float> bad = {std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(bags->SetRows(0, ids, bad).code(), StatusCode::kInvalidArgument);
}

// --- large groups ---

// 512 rows of dim 4,096 are as many sums as a thread keeps, so that a sample with one more ID makes
// the others' gradients be summed another way.
TEST(EmbeddingBagsTest, GradientsOfALargeGroupHaveTheSameSums) {
  constexpr uint32_t kDim = 4096, kNumIds = 512;
  const auto train = [&](uint64_t num_ids) {
    const auto bags = Make(Options({{.name = "id", .dim = kDim, .group = 0}}), Sgd());
    std::mt19937 rng(3);
    SlotIds batch(40);
    for (auto& ids : batch) {
      for (int i = 0; i < 10; ++i) ids.push_back(rng() % kNumIds);
    }
    batch.emplace_back(num_ids);
    std::iota(batch.back().begin(), batch.back().end(), uint64_t{0});
    std::normal_distribution<float> normal;
    std::vector<float> gradients(batch.size() * kDim);
    for (float& gradient : gradients) gradient = rng() % 8 == 0 ? -0.0f : normal(rng);
    EXPECT_EQ(Must(bags->Update(*Train(*bags, {batch}).batch, gradients)).num_updated, num_ids);
    SlotIds all(kNumIds);
    for (uint64_t id = 0; id < kNumIds; ++id) all[id] = {id};
    return Infer(*bags, {all});
  };
  EXPECT_TRUE(SameBits(train(kNumIds), train(kNumIds + 1)));
}

TEST(EmbeddingBagsTest, AnUpdateKeepsNoSumOfEachRowOfALargeGroup) {
  constexpr uint32_t kDim = 4096;
  TrainConfig config = Sgd();
  config.admit_after = 100;  // no row takes memory
  const auto bags = Make(Options({{.name = "id", .dim = kDim, .group = 0}}), config);
  SlotIds batch = {std::vector<uint64_t>(40'000)};
  std::iota(batch[0].begin(), batch[0].end(), uint64_t{0});
  const PooledBags pooled = Train(*bags, {batch});
  const auto peak = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;  // KiB
  };
  const auto before = peak();
  const std::vector<float> gradients(kDim, 1.0f);
  EXPECT_EQ(Must(bags->Update(*pooled.batch, gradients)).num_missing, 40'000u);
  EXPECT_LT(peak() - before, 64 << 10);  // sums of all rows take 640 MiB
}

}  // namespace
}  // namespace persia::client

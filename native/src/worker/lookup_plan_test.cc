// Plans: every sign of a group is asked for once, on its server, and found again.
#include "worker/lookup_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

// The plan's signs by number, put together from the requests.
std::vector<uint64_t> SignsByNumber(const LookupPlan& plan) {
  std::vector<uint64_t> signs;
  std::vector<size_t> next(plan.requests.size(), 0);
  for (const uint16_t server : plan.server_of) {
    signs.push_back(plan.requests[server].signs[next[server]++]);
  }
  return signs;
}

std::vector<uint64_t> Distinct(const std::vector<uint64_t>& values) {
  std::vector<uint64_t> distinct;
  std::set<uint64_t> seen;
  for (const uint64_t value : values) {
    if (seen.insert(value).second) distinct.push_back(value);
  }
  return distinct;
}

TEST(LookupPlanTest, DeduplicatesWithinAGroupInTheOrderOfFirstAppearance) {
  const SlotTable slots = MakeSlots({{.name = "a", .dim = 4, .group = 0},
                                     {.name = "b", .dim = 4, .group = 1},
                                     {.name = "c", .dim = 4, .group = 0}});
  const FeatureBatch batch =
      MakeBatch({{"a", {{7, 5}, {7}}}, {"b", {{5}, {}}}, {"c", {{9, 5}, {6}}}}, slots);
  const LookupPlan plan = LookupPlanner().Make(batch, slots, 1);
  const uint64_t group_a = uint64_t{1} << 56, group_b = uint64_t{2} << 56;
  EXPECT_EQ(plan.requests[0].signs, (std::vector<uint64_t>{group_a + 7, group_a + 5, group_a + 9,
                                                           group_a + 6, group_b + 5}));
  EXPECT_EQ(plan.features[0].sign_numbers, (std::vector<uint32_t>{0, 1, 0}));
  EXPECT_EQ(plan.features[1].sign_numbers, (std::vector<uint32_t>{4}));
  EXPECT_EQ(plan.features[2].sign_numbers, (std::vector<uint32_t>{2, 1, 3}));
  EXPECT_EQ(plan.num_ids, 7u);
  EXPECT_EQ(plan.num_signs(), 5u);
}

// 200 samples of IDs that repeat, so that the message has their numbers.
TestFeature Repeating(const std::string& name, size_t ids_a_sample, uint64_t num_distinct) {
  TestFeature feature{name, {}};
  uint64_t count = 0;
  for (size_t sample = 0; sample < 200; ++sample) {
    std::vector<uint64_t>& ids = feature.samples.emplace_back();
    while (ids.size() < ids_a_sample) ids.push_back(SignHash(count++ * 7 % num_distinct));
  }
  return feature;
}

// The order of first appearance is also that of servers' requests, so rows are inserted in it.
TEST(LookupPlanTest, IdsThatTheLoaderNumberedHaveThePlanOfThoseThatItDidNot) {
  const SlotTable slots = MakeSlots(
      {{.name = "one", .dim = 4, .group = 0},
       {.name = "shared", .dim = 4, .group = 0},
       {.name = "stacked", .dim = 4, .hash_stack_rounds = 2, .hash_stack_size = 10, .group = 1},
       {.name = "raw",
        .dim = 4,
        .embedding_summation = false,
        .sample_fixed_size = 2,
        .group = 2}});
  const TestBatch features = {Repeating("one", 1, 20), Repeating("shared", 3, 30),
                              Repeating("stacked", 2, 25), Repeating("raw", 3, 15)};
  const FeatureBatch batch = MakeBatch(features, slots);
  for (const Feature& feature : batch.features()) ASSERT_FALSE(feature.numbers.empty());
  const LookupPlan plan = LookupPlanner().Make(batch, slots, 1);
  const std::vector<uint64_t> by_number = SignsByNumber(plan);
  std::vector<std::vector<uint64_t>> signs_of_group(3);
  uint64_t num_ids = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    const SlotConfig& slot = *slots.Find(features[f].name);
    std::vector<uint64_t> ids;  // that are looked up
    for (const auto& sample : features[f].samples) {
      const size_t num_kept = slot.embedding_summation ? sample.size() : slot.sample_fixed_size;
      ids.insert(ids.end(), sample.begin(), sample.begin() + num_kept);
      num_ids += sample.size();
    }
    const PlannedFeature& planned = plan.features[f];
    if (!slot.embedding_summation) {
      const std::vector<uint64_t> distinct = Distinct(ids);
      ASSERT_EQ(planned.index.size(), ids.size());
      for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(distinct[planned.index[i] - 1], ids[i]);
      ids = distinct;
    }
    std::vector<uint64_t> signs(ids.size() * slot.num_buckets());
    slots.MakeSigns(slot, ids, signs.data());
    ASSERT_EQ(planned.sign_numbers.size(), signs.size());
    for (size_t i = 0; i < signs.size(); ++i) {
      EXPECT_EQ(by_number[planned.sign_numbers[i]], signs[i]) << slot.name << " " << i;
    }
    auto& all = signs_of_group[slot.group];
    all.insert(all.end(), signs.begin(), signs.end());
  }
  std::vector<uint64_t> expected;
  for (const auto& signs : signs_of_group) {
    const std::vector<uint64_t> distinct = Distinct(signs);
    expected.insert(expected.end(), distinct.begin(), distinct.end());
  }
  EXPECT_EQ(plan.requests[0].signs, expected);
  EXPECT_EQ(plan.num_ids, num_ids);
}

// Otherwise a sender could have rows made that no sample names, or rows made in another order.
TEST(LookupPlanTest, NumbersOfAnotherSenderHaveThePlanOfTheirIds) {
  constexpr size_t kNumDistinct = 20, kNumbers = 16 + 32 + 8 + kNumDistinct * sizeof(uint64_t);
  for (const bool is_sum : {true, false}) {
    const SlotTable slots = MakeSlots(
        {{.name = "one", .dim = 4, .embedding_summation = is_sum, .sample_fixed_size = 1}});
    TestFeature ids = Repeating("one", 1, kNumDistinct);
    std::vector<std::byte> bytes = EncodeBatch({ids});
    ASSERT_EQ(bytes.size(), kNumbers + ids.samples.size());
    std::vector<std::vector<uint64_t>> samples;
    for (size_t i = 0; i < ids.samples.size(); ++i) {
      std::byte& number = bytes[kNumbers + i];
      ASSERT_EQ(size_t(number), i % kNumDistinct);
      if (size_t(number) < 2) number ^= std::byte{1};    // 0 and 1 are swapped
      if (size_t(number) == 19) number = std::byte{18};  // 19 is unused
      samples.push_back(ids.samples[size_t(number)]);
    }
    ids.samples = samples;
    auto batch = FeatureBatch::Decode(ToBuffer(bytes), slots);
    ASSERT_TRUE(batch.ok()) << batch.status().ToString();
    const LookupPlan plan = LookupPlanner().Make(*batch, slots, 1);
    const LookupPlan expected = LookupPlanner().Make(MakeBatch({ids}, slots), slots, 1);
    EXPECT_EQ(plan.requests[0].signs, expected.requests[0].signs);
    EXPECT_EQ(plan.requests[0].signs.size(), kNumDistinct - 1);
    EXPECT_EQ(plan.features[0].sign_numbers, expected.features[0].sign_numbers);
    EXPECT_EQ(plan.features[0].index, expected.features[0].index);
  }
}

TEST(LookupPlanTest, RawSlotKeepsTheFirstIdsOfASample) {
  const SlotTable slots =
      MakeSlots({{.name = "raw", .dim = 4, .embedding_summation = false, .sample_fixed_size = 3}});
  const FeatureBatch batch =
      MakeBatch({{"raw", {{8, 8, 6, 99}, {}, {6, 4}}}}, slots);  // 99 is dropped
  const LookupPlan plan = LookupPlanner().Make(batch, slots, 1);
  const PlannedFeature& raw = plan.features[0];
  EXPECT_EQ(raw.index, (std::vector<uint32_t>{1, 1, 2, 0, 0, 0, 2, 3, 0}));
  EXPECT_EQ(raw.offsets, (std::vector<uint32_t>{0, 4, 4, 6}));  // but counted
  EXPECT_EQ(raw.num_items(), 3u);
  EXPECT_EQ(raw.num_rows(), 4u);
  EXPECT_EQ(plan.requests[0].signs, SignsOf(slots, *raw.slot, std::vector<uint64_t>{8, 6, 4}));
}

TEST(LookupPlanTest, BatchWithoutIdsAsksNobody) {
  const SlotTable slots = MakeSlots(MixedSlots());
  const FeatureBatch batch = MakeBatch({{"plain", {{}, {}}}, {"raw_stacked", {{}, {}}}}, slots);
  const LookupPlan plan = LookupPlanner().Make(batch, slots, 3);
  EXPECT_EQ(plan.num_signs(), 0u);
  ASSERT_EQ(plan.requests.size(), 3u);
  for (const ServerBlocks& request : plan.requests) EXPECT_TRUE(request.blocks.empty());
  EXPECT_EQ(plan.features[0].num_rows(), 2u);
  EXPECT_EQ(plan.features[1].num_rows(), 1u);
}

void CheckRequests(const LookupPlan& plan) {
  std::set<uint64_t> all;
  for (size_t server = 0; server < plan.requests.size(); ++server) {
    const ServerBlocks& request = plan.requests[server];
    size_t num_signs = 0;
    for (const auto& block : request.blocks) {
      EXPECT_GT(block.num_signs, 0u);
      num_signs += block.num_signs;
    }
    EXPECT_EQ(num_signs, request.signs.size());
    for (const uint64_t sign : request.signs) {
      EXPECT_TRUE(all.insert(sign).second) << "asked for twice";
      EXPECT_EQ(plan.placement.ServerOf(SignHash(sign)), server);
    }
  }
  EXPECT_EQ(all.size(), plan.num_signs());
}

// Each ID's signs have the numbers that the plan gives them.
void CheckFeature(const TestFeature& ids, const PlannedFeature& planned, const SlotTable& slots,
                  const std::vector<uint64_t>& by_number) {
  std::vector<uint64_t> items;
  for (const auto& sample : ids.samples) {
    const size_t kept = planned.slot->embedding_summation
                            ? sample.size()
                            : std::min<size_t>(sample.size(), planned.slot->sample_fixed_size);
    items.insert(items.end(), sample.begin(), sample.begin() + static_cast<ptrdiff_t>(kept));
  }
  if (!planned.slot->embedding_summation) items = Distinct(items);
  std::vector<uint64_t> signs;
  for (const uint32_t number : planned.sign_numbers) signs.push_back(by_number[number]);
  EXPECT_EQ(signs, SignsOf(slots, *planned.slot, items)) << ids.name;
}

TEST(LookupPlanTest, RandomBatchesAreCompleteAndConsistent) {
  const SlotTable slots = MakeSlots(MixedSlots());
  std::mt19937 rng(3);
  LookupPlanner planner;  // reused: nothing of the last batch may show
  for (int round = 0; round < 60; ++round) {
    const TestBatch ids = RandomBatch(rng, rng() % 20);
    const uint32_t num_servers = 1 + rng() % 5;
    const LookupPlan plan = planner.Make(MakeBatch(ids, slots), slots, num_servers);
    CheckRequests(plan);
    const std::vector<uint64_t> by_number = SignsByNumber(plan);
    for (size_t i = 0; i < ids.size(); ++i) {
      CheckFeature(ids[i], plan.features[i], slots, by_number);
    }
    const LookupPlan again = LookupPlanner().Make(MakeBatch(ids, slots), slots, num_servers);
    EXPECT_EQ(SignsByNumber(again), by_number);
  }
}

// All virtual shards of odd numbers are on server 0.
Placement Odd(uint32_t num_servers) {
  std::vector<MovedShard> moved;
  for (uint16_t shard = 1; shard < kNumVirtualShards; shard += 2) moved.push_back({shard, 0});
  return Placement::Create(num_servers, 1, moved).value();
}

TEST(LookupPlanTest, ReroutedIsThePlanForTheOtherServers) {
  const SlotTable slots = MakeSlots(MixedSlots());
  std::mt19937 rng(29);
  for (int i = 0; i < 20; ++i) {
    const TestBatch random = RandomBatch(rng, 30);
    LookupPlan plan = LookupPlanner().Make(MakeBatch(random, slots), slots, 2);
    for (const Placement& placement : std::vector<Placement>{3, 5, 2, Odd(2), 1, 4, Odd(4)}) {
      Reroute(placement, &plan);
      const uint32_t num_servers = placement.num_servers();
      const LookupPlan wanted = LookupPlanner().Make(MakeBatch(random, slots), slots, placement);
      EXPECT_EQ(plan.placement, placement);
      ASSERT_EQ(plan.requests.size(), num_servers);
      EXPECT_EQ(plan.server_of, wanted.server_of);
      for (uint32_t server = 0; server < num_servers; ++server) {
        const ServerBlocks &found = plan.requests[server], &other = wanted.requests[server];
        EXPECT_EQ(found.signs, other.signs);
        ASSERT_EQ(found.blocks.size(), other.blocks.size());
        for (size_t block = 0; block < found.blocks.size(); ++block) {
          EXPECT_EQ(found.blocks[block].dim, other.blocks[block].dim);
          EXPECT_EQ(found.blocks[block].num_signs, other.blocks[block].num_signs);
        }
      }
    }
  }
}

TEST(LookupPlanTest, LocatesTheRowOfEverySign) {
  const SlotTable slots = MakeSlots(MixedSlots());
  std::mt19937 rng(4);
  for (const uint32_t num_servers : {1u, 2u, 7u}) {
    const LookupPlan plan =
        LookupPlanner().Make(MakeBatch(RandomBatch(rng, 16), slots), slots, num_servers);
    const TestAnswers answers(plan);
    std::vector<const float*> rows;
    LocateRows(plan, answers.begins(), &rows);
    const std::vector<uint64_t> signs = SignsByNumber(plan);
    ASSERT_EQ(rows.size(), signs.size());
    size_t number = 0;
    for (const PlannedGroup& group : plan.groups) {
      for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
        EXPECT_EQ(rows[number][0], RowElement(signs[number], 0));
        EXPECT_EQ(rows[number][group.dim - 1], RowElement(signs[number], group.dim - 1));
      }
    }
  }
}

// Groups are of three modes by turns.
SlotTable SlotsOfThreeModes() {
  auto slots = MixedSlots();
  for (SlotConfig& slot : slots) slot.mode = slot.group % 3;
  return MakeSlots(slots);
}

TEST(LookupPlanTest, EachModeAsksForItsGroupsAndFindsTheirRows) {
  const SlotTable slots = SlotsOfThreeModes();
  std::mt19937 rng(5);
  for (const uint32_t num_servers : {1u, 2u, 7u}) {
    const LookupPlan plan =
        LookupPlanner().Make(MakeBatch(RandomBatch(rng, 16), slots), slots, num_servers);
    const std::vector<uint64_t> signs = SignsByNumber(plan);
    for (const SlotMask wanted : {kAllSlots, 1u, 2u, 4u, 5u, 7u, ~0u}) {
      LookupPlan asked = plan;
      asked.requests = SelectRequests(plan, SignsOfSlots{wanted});
      const TestAnswers answers(asked);
      std::vector<const float*> rows;
      LocateRows(plan, answers.begins(), &rows, SignsOfSlots{wanted});
      size_t number = 0, num_asked = 0;
      for (const PlannedGroup& group : plan.groups) {
        const bool here = Includes(wanted, group.mode);
        for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
          ASSERT_EQ(rows[number] != nullptr, here);
          if (here) {
            EXPECT_EQ(rows[number][0], RowElement(signs[number], 0));
          }
        }
        if (here) num_asked += group.num_signs;
      }
      for (const ServerBlocks& request : asked.requests) num_asked -= request.signs.size();
      EXPECT_EQ(num_asked, 0u);
    }
  }
}

}  // namespace
}  // namespace persia::worker

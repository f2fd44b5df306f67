// From IDs to signs: the published vectors, and the configurations that must be refused.
#include "worker/slot_table.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "simd/kernels.h"
#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

TEST(FoldIdTest, IsTheRemainder) {
  std::mt19937_64 rng(1);
  for (const uint32_t id_bits : {32u, 33u, 52u, 56u, 63u}) {
    const uint64_t modulus = (uint64_t{1} << id_bits) - 1;
    for (const uint64_t id :
         {uint64_t{0}, uint64_t{1}, modulus - 1, modulus, modulus + 1, 2 * modulus, UINT64_MAX}) {
      EXPECT_EQ(FoldId(id, id_bits), id % modulus) << id << " in " << id_bits;
    }
    for (int i = 0; i < 1000; ++i) {
      const uint64_t id = rng() >> (rng() % 64);
      EXPECT_EQ(FoldId(id, id_bits), id % modulus) << id << " in " << id_bits;
    }
  }
}

TEST(FoldIdTest, KernelsFoldMany) {
  std::mt19937_64 rng(1);
  for (const uint32_t id_bits : {32u, 56u, 63u}) {
    const uint64_t modulus = (uint64_t{1} << id_bits) - 1, prefix = uint64_t{1} << id_bits;
    std::vector<uint64_t> ids = {0, 1, modulus - 1, modulus, modulus + 1, 2 * modulus, UINT64_MAX};
    while (ids.size() < 300) ids.push_back(rng() >> (rng() % 64));
    std::vector<uint64_t> expected, signs(ids.size());
    for (const uint64_t id : ids) expected.push_back(FoldId(id, id_bits) + prefix);
    for (const auto isa :
         {simd::Isa::kScalar, simd::Isa::kAvx2, simd::Isa::kAvx512, simd::Isa::kNeon}) {
      const simd::Kernels* kernels = simd::KernelsFor(isa);
      if (kernels == nullptr) continue;
      kernels->fold_ids(signs.data(), ids.data(), id_bits, prefix, ids.size());
      EXPECT_EQ(signs, expected) << kernels->name;
    }
  }
}

TEST(SlotTableTest, PublishedPrefixVectors) {
  const SlotTable slots =
      MakeSlots({{.name = "slot", .dim = 1, .index_prefix = 450359962737049600}}, 12);
  EXPECT_EQ(SignsOf(slots, *slots.Find("slot"), std::vector<uint64_t>{12, 16000000000000000}),
            (std::vector<uint64_t>{450359962737049612, 452849163854938115}));
}

TEST(SlotTableTest, PublishedHashStackVectors) {
  const SlotTable slots =
      MakeSlots({{.name = "slot", .dim = 1, .hash_stack_rounds = 2, .hash_stack_size = 10}}, 8);
  const SlotConfig& slot = *slots.Find("slot");
  EXPECT_EQ(slot.index_prefix, uint64_t{1} << 56);
  std::vector<uint64_t> signs = SignsOf(slots, slot, std::vector<uint64_t>{12, 23, 34, 56, 78, 90});
  for (uint64_t& sign : signs) sign -= slot.index_prefix;
  EXPECT_EQ(signs, (std::vector<uint64_t>{2, 18, 5, 10, 0, 11, 6, 17, 7, 12, 8, 16}));
}

TEST(SlotTableTest, GroupsAreNumberedFromOneAndKeepApart) {
  const SlotTable slots = MakeSlots({{.name = "a", .dim = 4, .group = 0},
                                     {.name = "b", .dim = 4, .group = 1},
                                     {.name = "c", .dim = 4, .group = 0}});
  EXPECT_EQ(slots.Find("a")->index_prefix, uint64_t{1} << 56);
  EXPECT_EQ(slots.Find("b")->index_prefix, uint64_t{2} << 56);
  EXPECT_EQ(slots.Find("c")->index_prefix, slots.Find("a")->index_prefix);
  EXPECT_EQ(slots.Find("d"), nullptr);
}

TEST(SlotTableTest, FindsSlotsAfterAMove) {
  SlotTable slots = MakeSlots({{.name = "a", .dim = 4}});
  const SlotConfig* before = slots.Find("a");
  const SlotTable moved = std::move(slots);
  EXPECT_EQ(moved.Find("a"), before);  // pointers to a slot survive the move
}

// The last group that fits: prefixes are numbered from 1, and all ones is the largest.
TEST(SlotTableTest, AllPrefixesCanBeUsed) {
  EXPECT_TRUE(SlotTable::Create(2, {{.name = "a", .dim = 1, .group = 2}}).ok());
  EXPECT_TRUE(SlotTable::Create(1, {{.name = "a", .dim = 1, .group = 0}}).ok());
  EXPECT_TRUE(SlotTable::Create(32, {{.name = "a", .dim = 1, .group = UINT32_MAX - 1}}).ok());
}

struct Refusal {
  const char* what;
  uint32_t prefix_bit;
  std::vector<SlotConfig> slots;
  const char* named;
};

TEST(SlotTableTest, RefusalsNameTheSlot) {
  const SlotConfig good = {.name = "good", .dim = 4, .group = 7};
  const std::vector<Refusal> refusals = {
      {"no slots", 8, {}, "no slots"},
      {"prefix of 0 bits", 0, {good}, "feature_index_prefix_bit is 0"},
      {"prefix of 33 bits", 33, {good}, "feature_index_prefix_bit is 33"},
      {"no name", 8, {good, {.name = "", .dim = 4}}, "empty name"},
      {"dim 0", 8, {good, {.name = "bad"}}, "'bad'"},
      {"huge dim", 8, {good, {.name = "bad", .dim = kMaxDim + 1}}, "'bad'"},
      {"twice", 8, {good, good}, "'good'"},
      {"raw without a size",
       8,
       {{.name = "bad", .dim = 4, .embedding_summation = false, .sample_fixed_size = 0}},
       "'bad'"},
      {"raw with a huge size",
       8,
       {{.name = "bad", .dim = 4, .embedding_summation = false, .sample_fixed_size = 65536}},
       "'bad'"},
      {"a root and a mean",
       8,
       {{.name = "bad", .dim = 4, .sqrt_scaling = true, .mean_scaling = true}},
       "'bad'"},
      {"a mean of a raw slot",
       8,
       {{.name = "bad", .dim = 4, .embedding_summation = false, .mean_scaling = true}},
       "'bad'"},
      {"rounds without a size", 8, {{.name = "bad", .dim = 4, .hash_stack_rounds = 2}}, "'bad'"},
      {"a hash stack too large",
       32,
       {{.name = "bad", .dim = 4, .hash_stack_rounds = 2, .hash_stack_size = 1u << 31}},
       "'bad'"},
      {"a hash stack that overflows",
       8,
       {{.name = "bad", .dim = 4, .hash_stack_rounds = 16, .hash_stack_size = uint64_t{1} << 60}},
       "'bad'"},
      {"too many groups", 2, {{.name = "bad", .dim = 4, .group = 3}}, "'bad'"},
      {"a prefix with low bits", 8, {{.name = "bad", .dim = 4, .index_prefix = 1}}, "'bad'"},
      {"dims of a group", 8, {good, {.name = "bad", .dim = 5, .group = 7}}, "'bad'"},
      {"prefixes of a group",
       8,
       {good, {.name = "bad", .dim = 4, .index_prefix = uint64_t{3} << 56, .group = 7}},
       "'bad'"},
      {"a prefix of another group",
       8,
       {good, {.name = "bad", .dim = 4, .index_prefix = uint64_t{8} << 56, .group = 1}},
       "'bad'"},
  };
  for (const Refusal& refusal : refusals) {
    const auto slots = SlotTable::Create(refusal.prefix_bit, refusal.slots);
    EXPECT_EQ(slots.status().code(), StatusCode::kInvalidArgument) << refusal.what;
    EXPECT_NE(slots.status().message().find(refusal.named), std::string::npos)
        << refusal.what << ": " << slots.status().message();
  }
}

// The largest hash stack that is let in leaves every bucket a sign of its own.
TEST(SlotTableTest, LargestHashStackStaysBelowThePrefix) {
  const SlotTable slots = MakeSlots(
      {{.name = "a", .dim = 1, .hash_stack_rounds = 2, .hash_stack_size = (1u << 31) - 1}}, 32);
  const SlotConfig& slot = *slots.Find("a");
  for (uint64_t id = 0; id < 1000; ++id) {
    const auto signs = SignsOf(slots, slot, std::vector<uint64_t>{id});
    for (size_t round = 0; round < 2; ++round) {
      EXPECT_EQ(signs[round] >> 32, 1u);
      EXPECT_EQ((signs[round] & UINT32_MAX) / slot.hash_stack_size, round);
    }
  }
}

SlotRowConfig OwnRate(float lr) {
  SlotRowConfig rows;
  rows.optimizer = OptimizerConfig::Of(OptimizerKind::kAdam);
  rows.optimizer->lr = lr;
  return rows;
}

TEST(SlotTableTest, GroupsGetTheRowsOfTheirSlots) {
  auto slots = SlotTable::Create(12, {{.name = "a", .dim = 4, .group = 5, .rows = OwnRate(0.5f)},
                                      {.name = "b", .dim = 4, .group = 2},
                                      {.name = "c", .dim = 4, .group = 1, .rows = OwnRate(0.25f)}})
                   .value();
  TrainConfig job;
  job.lr_factor = 0.5f;
  job.initializer.seed = 9;
  const TrainConfig full = slots.WithGroups(job);
  ASSERT_TRUE(full.Validate().ok()) << full.Validate().ToString();
  EXPECT_EQ(full.feature_index_prefix_bit, 12u);
  ASSERT_EQ(full.groups.size(), 2u) << "b has those of the job";
  EXPECT_EQ(full.groups[0].group, 2u) << "numbers count from 1, and rise";
  EXPECT_EQ(full.groups[0].rows.optimizer.lr, 0.125f);
  EXPECT_EQ(full.groups[1].group, 6u);
  EXPECT_EQ(full.groups[1].rows.optimizer.lr, 0.25f);
  EXPECT_EQ(full.groups[1].rows.initializer.seed, 9u);
  EXPECT_EQ(slots.WithGroups(full), full) << "again is the same";
}

TEST(SlotTableTest, WithoutOwnRowsTheConfigStaysAsItIs) {
  auto slots = SlotTable::Create(8, {{.name = "a", .dim = 4}}).value();
  EXPECT_EQ(slots.WithGroups(TrainConfig()), TrainConfig());
}

TEST(SlotTableTest, OwnRowsMustBeEqualInAGroupAndItsNumberInReach) {
  const auto refusal = [](uint32_t bits, std::vector<SlotConfig> slots) {
    return SlotTable::Create(bits, std::move(slots)).status().message();
  };
  EXPECT_NE(refusal(8, {{.name = "a", .dim = 4}, {.name = "b", .dim = 4, .rows = OwnRate(1.0f)}})
                .find("slot 'b': optimizer"),
            std::string::npos);
  EXPECT_NE(refusal(32, {{.name = "far", .dim = 4, .group = 65'535, .rows = OwnRate(1.0f)}})
                .find("slot 'far': is in feature group 65536"),
            std::string::npos);
}

}  // namespace
}  // namespace persia::worker

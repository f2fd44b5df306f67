// Reduction, against plain loops in double precision over the IDs.
#include "worker/reduction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

using GradientBySign = std::map<uint64_t, std::vector<float>>;

// A batch, its plan, and a gradient for every slot.
class Scenario {
 public:
  Scenario(const TestBatch& ids, uint32_t num_servers, std::mt19937& rng)
      : ids_(ids), plan_(LookupPlanner().Make(MakeBatch(ids, slots_), slots_, num_servers)) {
    for (const PlannedFeature& feature : plan_.features) {
      auto& rows = rows_[feature.slot->name];
      rows.resize(size_t{feature.num_rows()} * feature.slot->dim);
      for (float& element : rows) element = (static_cast<float>(rng() % 64) - 31.5f) / 8;
    }
  }
  Scenario(const Scenario&) = delete;  // gradients() are views

  std::vector<SlotGradient> gradients() const {
    std::vector<SlotGradient> all;
    for (const PlannedFeature& feature : plan_.features) {
      const SlotConfig& slot = *feature.slot;
      all.push_back({.slot = slot.name,
                     .num_rows = feature.num_rows(),
                     .dim = slot.dim,
                     .rows = rows_.at(slot.name).data()});
    }
    return all;
  }
  const LookupPlan& plan() const { return plan_; }
  std::vector<float>& rows(const std::string& slot) { return rows_.at(slot); }

  // What the slots outside `left_out` give each sign.
  std::map<uint64_t, std::vector<double>> Expected(const std::set<std::string>& left_out,
                                                   double scale) const {
    std::map<uint64_t, std::vector<double>> sums;
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (left_out.contains(ids_[i].name)) continue;
      if (plan_.features[i].slot->embedding_summation) {
        AddPooled(ids_[i], scale, &sums);
      } else {
        AddRaw(ids_[i], scale, &sums);
      }
    }
    return sums;
  }

 private:
  using Sums = std::map<uint64_t, std::vector<double>>;

  void AddRow(const SlotConfig& slot, std::span<const uint64_t> ids, size_t row, double scale,
              Sums* sums) const {
    const std::vector<uint64_t> signs = SignsOf(slots_, slot, ids);
    double divisor = 1;
    if (slot.sqrt_scaling) divisor = std::sqrt(static_cast<double>(signs.size()));
    if (slot.mean_scaling) divisor = static_cast<double>(ids.size());
    for (const uint64_t sign : signs) {
      auto& sum = (*sums)[sign];
      sum.resize(slot.dim, 0.0);
      for (uint32_t e = 0; e < slot.dim; ++e) {
        sum[e] += rows_.at(slot.name)[row * slot.dim + e] / scale / divisor;
      }
    }
  }
  void AddPooled(const TestFeature& feature, double scale, Sums* sums) const {
    const SlotConfig& slot = *slots_.Find(feature.name);
    for (size_t sample = 0; sample < feature.samples.size(); ++sample) {
      AddRow(slot, feature.samples[sample], sample, scale, sums);
    }
  }
  // Autograd has summed over the places of an ID already: each distinct one has one row.
  void AddRaw(const TestFeature& feature, double scale, Sums* sums) const {
    const SlotConfig& slot = *slots_.Find(feature.name);
    std::set<uint64_t> seen;
    for (const auto& sample : feature.samples) {
      for (size_t i = 0; i < std::min<size_t>(sample.size(), slot.sample_fixed_size); ++i) {
        if (!seen.insert(sample[i]).second) continue;
        AddRow(slot, std::span(sample).subspan(i, 1), seen.size(), scale, sums);
      }
    }
  }

  const SlotTable slots_ = MakeSlots(MixedSlots());
  const TestBatch ids_;
  const LookupPlan plan_;
  std::map<std::string, std::vector<float>> rows_;
};

GradientBySign BySign(const ReducedGradients& reduced) {
  GradientBySign gradients;
  const Placement placement(static_cast<uint32_t>(reduced.requests.size()));
  for (size_t server = 0; server < reduced.requests.size(); ++server) {
    const ServerBlocks& request = reduced.requests[server];
    EXPECT_EQ(reduced.gradients[server].size(), request.num_floats());
    const float* next = reduced.gradients[server].data();
    size_t sign = 0;
    for (const auto& block : request.blocks) {
      for (uint32_t i = 0; i < block.num_signs; ++i, next += block.dim) {
        const uint64_t key = request.signs[sign++];
        EXPECT_EQ(placement.ServerOf(SignHash(key)), server);
        EXPECT_TRUE(gradients.emplace(key, std::vector<float>(next, next + block.dim)).second);
      }
    }
    EXPECT_EQ(sign, request.signs.size());
  }
  return gradients;
}

ReducedGradients Reduce(const Scenario& scenario, float scale,
                        const std::vector<SlotGradient>& gradients) {
  auto reduced = ReduceGradients(scenario.plan(), scale, gradients);
  EXPECT_TRUE(reduced.ok()) << reduced.status().ToString();
  return std::move(reduced).value();
}

void ExpectEqual(const ReducedGradients& reduced,
                 const std::map<uint64_t, std::vector<double>>& expected) {
  const GradientBySign gradients = BySign(reduced);
  ASSERT_EQ(gradients.size(), expected.size());  // signs without a contributing slot are left out
  for (const auto& [sign, sum] : expected) {
    const auto found = gradients.find(sign);
    ASSERT_NE(found, gradients.end()) << sign;
    ASSERT_EQ(found->second.size(), sum.size());
    for (size_t e = 0; e < sum.size(); ++e) {
      EXPECT_NEAR(found->second[e], sum[e], 1e-5 * (1 + std::abs(sum[e])));
    }
  }
}

TEST(ReductionTest, RandomBatchesAgreeWithPlainLoops) {
  std::mt19937 rng(7);
  for (int round = 0; round < 40; ++round) {
    const Scenario scenario(RandomBatch(rng, rng() % 12), 1 + rng() % 4, rng);
    const float scale = round % 2 == 0 ? 1.0f : 1024.0f;
    const ReducedGradients reduced = Reduce(scenario, scale, scenario.gradients());
    EXPECT_EQ(reduced.nonfinite_features.size() + reduced.skipped_features.size(), 0u);
    ExpectEqual(reduced, scenario.Expected({}, scale));
  }
}

TEST(ReductionTest, OrderOfSlotsAndNumberOfServersDoNotShowInTheBits) {
  std::mt19937 rng(8);
  const TestBatch ids = RandomBatch(rng, 40);
  std::mt19937 same_values(9), same_values_again(9);
  const Scenario one(ids, 1, same_values), four(ids, 4, same_values_again);
  std::vector<SlotGradient> shuffled = one.gradients();
  std::shuffle(shuffled.begin(), shuffled.end(), rng);
  const GradientBySign expected = BySign(Reduce(one, 3.0f, one.gradients()));
  EXPECT_EQ(BySign(Reduce(one, 3.0f, shuffled)), expected);
  EXPECT_EQ(BySign(Reduce(four, 3.0f, four.gradients())), expected);
}

// Groups whose bags are single rows are summed another way than the others: both must be there.
TEST(ReductionTest, OneIdEachAgreesWithPlainLoops) {
  std::mt19937 rng(16);
  TestBatch ids = {{"plain", {}}, {"stacked", {}}, {"sqrt", {}}};
  for (TestFeature& feature : ids) {
    for (int sample = 0; sample < 50; ++sample) feature.samples.push_back({rng() % 9});
  }
  for (const float scale : {1.0f, 1024.0f}) {
    std::mt19937 same_values(17), same_values_again(17);
    const Scenario one(ids, 1, same_values), three(ids, 3, same_values_again);
    const ReducedGradients reduced = Reduce(three, scale, three.gradients());
    ExpectEqual(reduced, three.Expected({}, scale));
    EXPECT_EQ(BySign(Reduce(one, scale, one.gradients())), BySign(reduced));
    const std::vector<SlotGradient> without_last = {one.gradients()[0], one.gradients()[1]};
    ExpectEqual(Reduce(one, scale, without_last), one.Expected({"sqrt"}, scale));
  }
}

// Each kind of slot in turn contributes nothing, for each of the reasons.
TEST(ReductionTest, SlotThatContributesNothingIsLeftOutExactly) {
  std::mt19937 rng(10);
  for (const SlotConfig& slot : MixedSlots()) {
    const Scenario scenario(RandomBatch(rng, 15), 2, rng);
    const auto expected = scenario.Expected({slot.name}, 2.0);
    std::vector<SlotGradient> gradients = scenario.gradients();
    const auto entry = std::find_if(gradients.begin(), gradients.end(),
                                    [&](const SlotGradient& g) { return g.slot == slot.name; });
    entry->skipped = true;
    const ReducedGradients skipped = Reduce(scenario, 2.0f, gradients);
    EXPECT_EQ(skipped.skipped_features.size(), 1u);
    ExpectEqual(skipped, expected);
    gradients.erase(entry);
    const ReducedGradients absent = Reduce(scenario, 2.0f, gradients);
    EXPECT_EQ(absent.skipped_features.size(), 1u);
    EXPECT_EQ(BySign(absent), BySign(skipped));
  }
}

TEST(ReductionTest, NonFiniteSlotIsSkippedExactlyAndCounted) {
  std::mt19937 rng(11);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    TestBatch ids = RandomBatch(rng, 10);
    for (TestFeature& feature : ids) feature.samples.back() = {1, 2};
    Scenario scenario(ids, 3, rng);
    scenario.rows("sqrt").back() = bad;
    scenario.rows("raw").back() = bad;
    const ReducedGradients reduced = Reduce(scenario, 1.0f, scenario.gradients());
    EXPECT_EQ(reduced.nonfinite_features.size(), 2u);
    EXPECT_EQ(reduced.skipped_features.size(), 0u);
    ExpectEqual(reduced, scenario.Expected({"sqrt", "raw"}, 1.0));
  }
}

// A sample without IDs adds to no sum, but what made its gradient made the others too.
TEST(ReductionTest, NonFiniteGradientOfASampleWithoutIdsIsCounted) {
  std::mt19937 rng(18);
  Scenario scenario({{"plain", {{1}, {}}}, {"stacked", {{1}, {2}}}}, 1, rng);
  scenario.rows("plain").back() = std::numeric_limits<float>::quiet_NaN();
  const ReducedGradients reduced = Reduce(scenario, 1.0f, scenario.gradients());
  EXPECT_EQ(reduced.nonfinite_features.size(), 1u);
  ExpectEqual(reduced, scenario.Expected({"plain"}, 1.0));
}

TEST(ReductionTest, HugeGradientsWhoseSumsAreFiniteContribute) {
  std::mt19937 rng(19);
  Scenario scenario({{"plain", {{1}, {2}}}, {"stacked", {{1}, {2}}}}, 1, rng);
  std::fill(scenario.rows("plain").begin(), scenario.rows("plain").end(), 3e38f);
  const ReducedGradients reduced = Reduce(scenario, 1.0f, scenario.gradients());
  EXPECT_EQ(reduced.nonfinite_features.size(), 0u);
  ExpectEqual(reduced, scenario.Expected({}, 1.0));
}

// Row 0 of a raw slot is padding: whatever autograd leaves there says nothing about the slot.
TEST(ReductionTest, PaddingRowIsIgnored) {
  std::mt19937 rng(12);
  Scenario scenario({{"raw", {{1, 2}, {}}}}, 1, rng);
  scenario.rows("raw")[0] = std::numeric_limits<float>::quiet_NaN();
  const ReducedGradients reduced = Reduce(scenario, 1.0f, scenario.gradients());
  EXPECT_EQ(reduced.nonfinite_features.size(), 0u);
  ExpectEqual(reduced, scenario.Expected({}, 1.0));
}

// Servers refuse infinities; one that only a sum makes must not cost the other slots their updates.
TEST(ReductionTest, SumsNeverOverflow) {
  std::mt19937 rng(13);
  Scenario scenario({{"plain", {{1, 1, 1}, {1}}}, {"stacked", {{1}, {2}}}}, 1, rng);
  std::fill(scenario.rows("plain").begin(), scenario.rows("plain").end(), 3e38f);
  const ReducedGradients reduced = Reduce(scenario, 1.0f, scenario.gradients());
  EXPECT_EQ(reduced.nonfinite_features.size(), 1u);
  ExpectEqual(reduced, scenario.Expected({"plain"}, 1.0));
  const ReducedGradients scaled = Reduce(scenario, 1024.0f, scenario.gradients());
  EXPECT_EQ(scaled.nonfinite_features.size(), 0u);
  for (const auto& [sign, gradient] : BySign(scaled)) {
    for (const float element : gradient) EXPECT_TRUE(std::isfinite(element)) << sign;
  }
}

// A mean of weights that nearly cancel multiplies by much.
TEST(ReductionTest, WeightedSumsNeverOverflow) {
  std::mt19937 rng(20);
  Scenario scenario({{"mean", {{1, 2}}, {1.0f, -0.9999999f}}, {"stacked", {{1}}}}, 1, rng);
  std::fill(scenario.rows("mean").begin(), scenario.rows("mean").end(), 1e36f);
  const ReducedGradients reduced = Reduce(scenario, 1.0f, scenario.gradients());
  EXPECT_EQ(reduced.nonfinite_features.size(), 1u);
  ExpectEqual(reduced, scenario.Expected({"mean"}, 1.0));
}

TEST(ReductionTest, NothingContributedLeavesNothingToUpdate) {
  std::mt19937 rng(14);
  const Scenario scenario(RandomBatch(rng, 8), 2, rng);
  const ReducedGradients reduced = Reduce(scenario, 1.0f, {});
  EXPECT_EQ(reduced.skipped_features.size(), scenario.plan().features.size());
  ASSERT_EQ(reduced.requests.size(), 2u);
  for (const ServerBlocks& request : reduced.requests) EXPECT_TRUE(request.blocks.empty());
}

class ReductionRefusalTest : public ::testing::Test {
 protected:
  void ExpectRefused(const std::vector<SlotGradient>& gradients, const std::string& named) {
    const Status status = ReduceGradients(scenario_.plan(), 1.0f, gradients).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
  }

  std::mt19937 rng_{15};
  const Scenario scenario_{{{"plain", {{1}, {2}}}, {"raw", {{1}, {2}}}}, 1, rng_};
  std::vector<SlotGradient> gradients_ = scenario_.gradients();
};

TEST_F(ReductionRefusalTest, WrongShapes) {
  gradients_[0].num_rows = 3;
  ExpectRefused(gradients_, "'plain': its shape is [3, 16], that of the embeddings [2, 16]");
  gradients_ = scenario_.gradients();
  gradients_[1].num_rows = 2;  // without the padding row
  ExpectRefused(gradients_, "'raw': its shape is [2, 16], that of the embeddings [3, 16]");
  gradients_ = scenario_.gradients();
  gradients_[0].dim = 15;
  ExpectRefused(gradients_, "'plain'");
}

TEST_F(ReductionRefusalTest, UnknownSlot) {
  gradients_[0].slot = "sqrt";  // of the configuration, not of the batch
  ExpectRefused(gradients_, "'sqrt'");
}

TEST_F(ReductionRefusalTest, SlotSentTwice) {
  gradients_.push_back(gradients_[1]);
  ExpectRefused(gradients_, "'raw': sent twice");
}

TEST_F(ReductionRefusalTest, ScaleThatIsNoDivisor) {
  for (const float scale : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(), 1e-45f}) {
    const Status status = ReduceGradients(scenario_.plan(), scale, gradients_).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << scale;
    EXPECT_NE(status.message().find("scale"), std::string::npos);
  }
}

}  // namespace
}  // namespace persia::worker

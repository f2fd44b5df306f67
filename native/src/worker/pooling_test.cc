// Pooling into an embeddings message, against plain loops in double precision over the IDs.

#include <gtest/gtest.h>

#include <cmath>

#include "worker/embeddings_message.h"
#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

TestEmbeddings PoolBatch(const TestBatch& ids, const SlotTable& slots, uint32_t num_servers) {
  const LookupPlan plan = LookupPlanner().Make(MakeBatch(ids, slots), slots, num_servers);
  const TestAnswers answers(plan);
  std::vector<const float*> rows;
  LocateRows(plan, answers.begins(), &rows);
  auto writer = LayOutEmbeddings(plan, 11, 22);
  EXPECT_TRUE(writer.ok());
  for (size_t i = 0; i < plan.features.size(); ++i) {
    PoolFeature(plan.features[i], plan.batch_size, rows, writer->slots[i]);
  }
  const Buffer message = std::move(writer->message);
  return ReadEmbeddings(message.span());
}

// The sum of all rows of the IDs, scaled as the slot says.
std::vector<double> ExpectedSum(const SlotTable& slots, const SlotConfig& slot,
                                std::span<const uint64_t> ids) {
  const std::vector<uint64_t> signs = SignsOf(slots, slot, ids);
  std::vector<double> sum(slot.dim, 0.0);
  for (const uint64_t sign : signs) {
    for (uint32_t e = 0; e < slot.dim; ++e) sum[e] += RowElement(sign, e);
  }
  if (signs.empty()) return sum;
  double divisor = 1;
  if (slot.sqrt_scaling) divisor = std::sqrt(static_cast<double>(signs.size()));
  if (slot.mean_scaling) divisor = static_cast<double>(ids.size());
  for (double& element : sum) element /= divisor;
  return sum;
}

void ExpectRow(std::span<const float> row, const std::vector<double>& expected) {
  ASSERT_EQ(row.size(), expected.size());
  for (size_t e = 0; e < row.size(); ++e) {
    EXPECT_NEAR(row[e], expected[e], 1e-6 * (1 + std::abs(expected[e])));
  }
}

void CheckPooled(const TestFeature& ids, const SlotTable& slots, const TestSlot& pooled) {
  const SlotConfig& slot = *slots.Find(ids.name);
  ASSERT_EQ(pooled.num_rows, ids.samples.size());
  for (size_t sample = 0; sample < ids.samples.size(); ++sample) {
    ExpectRow(std::span(pooled.rows).subspan(sample * slot.dim, slot.dim),
              ExpectedSum(slots, slot, ids.samples[sample]));
  }
}

// What the NN worker will see: row index[sample, i] for the sample's i-th ID.
void CheckRaw(const TestFeature& ids, const SlotTable& slots, const TestSlot& raw) {
  const SlotConfig& slot = *slots.Find(ids.name);
  const size_t width = slot.sample_fixed_size;
  ASSERT_EQ(raw.sample_fixed_size, width);
  ExpectRow(std::span(raw.rows).first(slot.dim), std::vector<double>(slot.dim, 0.0));
  for (size_t sample = 0; sample < ids.samples.size(); ++sample) {
    EXPECT_EQ(raw.sample_num_ids[sample], ids.samples[sample].size());
    for (size_t i = 0; i < width; ++i) {
      const int64_t row = raw.index[sample * width + i];
      if (i >= ids.samples[sample].size()) {
        EXPECT_EQ(row, 0);
        continue;
      }
      ASSERT_TRUE(row > 0 && row < raw.num_rows) << row;
      ExpectRow(std::span(raw.rows).subspan(static_cast<size_t>(row) * slot.dim, slot.dim),
                ExpectedSum(slots, slot, std::span(ids.samples[sample]).subspan(i, 1)));
    }
  }
}

TEST(PoolingTest, RandomBatchesAgreeWithPlainLoops) {
  const SlotTable slots = MakeSlots(MixedSlots());
  std::mt19937 rng(5);
  for (int round = 0; round < 40; ++round) {
    const TestBatch ids = RandomBatch(rng, rng() % 12);
    const TestEmbeddings embeddings = PoolBatch(ids, slots, 1 + rng() % 4);
    EXPECT_EQ(embeddings.worker_incarnation, 11u);
    EXPECT_EQ(embeddings.reference, 22u);
    ASSERT_EQ(embeddings.slots.size(), ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(embeddings.order[i], ids[i].name);
      const TestSlot& slot = embeddings.slots.at(ids[i].name);
      EXPECT_EQ(slot.raw, !slots.Find(ids[i].name)->embedding_summation);
      if (slot.raw) {
        CheckRaw(ids[i], slots, slot);
      } else {
        CheckPooled(ids[i], slots, slot);
      }
    }
  }
}

TEST(PoolingTest, NumberOfServersDoesNotShowInTheBits) {
  const SlotTable slots = MakeSlots(MixedSlots());
  std::mt19937 rng(6);
  const TestBatch ids = RandomBatch(rng, 50);
  const TestEmbeddings one = PoolBatch(ids, slots, 1), five = PoolBatch(ids, slots, 5);
  for (const auto& [name, slot] : one.slots) EXPECT_EQ(slot.rows, five.slots.at(name).rows) << name;
}

TEST(PoolingTest, ScalingLeavesNoRowAndOneRowAlone) {
  const std::vector<uint32_t> offsets = {0, 0, 1, 5};
  Bags bags = {.num_bags = 3, .offsets = offsets};
  for (const Scaling scaling : {Scaling::kNone, Scaling::kSqrt, Scaling::kMean}) {
    bags.scaling = scaling;
    EXPECT_EQ(bags.Factor(0), 1.0f);
    EXPECT_EQ(bags.Factor(1), 1.0f);
  }
  EXPECT_EQ(bags.Factor(2), 0.25f);
  bags.scaling = Scaling::kSqrt;
  EXPECT_EQ(bags.Factor(2), 0.5f);
  // The root counts rows, a mean IDs, each of which is the sum of its rows.
  bags.rows_per_offset = 4;
  EXPECT_EQ(bags.Factor(2), 0.25f);
  bags.scaling = Scaling::kMean;
  EXPECT_EQ(bags.Factor(2), 0.25f);
}

TEST(LayOutEmbeddingsTest, RefusesAMessageThatNobodyTakes) {
  const SlotTable slots = MakeSlots({{.name = "wide", .dim = kMaxDim}});
  const TestBatch ids = {{"wide", std::vector<std::vector<uint64_t>>(5000)}};
  const LookupPlan plan = LookupPlanner().Make(MakeBatch(ids, slots), slots, 1);
  const Status status = LayOutEmbeddings(plan, 1, 1).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("'wide'"), std::string::npos);
}

}  // namespace
}  // namespace persia::worker

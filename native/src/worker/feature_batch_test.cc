// Decoding what a loader sends: everything that is wrong is refused, by name.
#include <gtest/gtest.h>

#include "worker/lookup_plan.h"
#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

class FeatureBatchTest : public ::testing::Test {
 protected:
  Status DecodeStatus(std::span<const std::byte> bytes) const {
    return FeatureBatch::Decode(ToBuffer(bytes), slots_).status();
  }

  const SlotTable slots_ = MakeSlots(MixedSlots());
  const TestBatch batch_ = {{"plain", {{1, 2}, {}, {3}}}, {"raw", {{}, {}, {}}}};
  const std::vector<std::byte> bytes_ = EncodeBatch(batch_);
};

TEST_F(FeatureBatchTest, KeepsOrderSlotsAndIds) {
  const FeatureBatch batch = MakeBatch(batch_, slots_);
  EXPECT_EQ(batch.batch_size(), 3u);
  EXPECT_EQ(batch.size_bytes(), bytes_.size() + 3 * sizeof(uint64_t)) << "message and IDs";
  ASSERT_EQ(batch.features().size(), 2u);
  const Feature& plain = batch.features()[0];
  EXPECT_EQ(plain.slot, slots_.Find("plain"));
  EXPECT_EQ(std::vector<uint32_t>(plain.offsets.begin(), plain.offsets.end()),
            (std::vector<uint32_t>{0, 2, 2, 3}));
  EXPECT_EQ(std::vector<uint64_t>(plain.ids.begin(), plain.ids.end()),
            (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(batch.features()[1].slot, slots_.Find("raw"));
  EXPECT_TRUE(batch.features()[1].ids.empty());
}

TEST_F(FeatureBatchTest, KeepsWeights) {
  const FeatureBatch batch = MakeBatch({{"plain", {{1, 2}, {}, {3}}, {1, 0.5f, -2}}}, slots_);
  const auto weights = batch.features()[0].weights;
  EXPECT_EQ(std::vector<float>(weights.begin(), weights.end()), (std::vector<float>{1, 0.5f, -2}));
}

TEST_F(FeatureBatchTest, WeightsForARawSlotAreRefused) {
  const Status status = DecodeStatus(EncodeBatch({{"raw", {{1, 2}}, {1, 2}}}));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("'raw'"), std::string::npos) << status.message();
}

TEST_F(FeatureBatchTest, ViewsSurviveMoves) {
  FeatureBatch first = MakeBatch(batch_, slots_);
  const uint64_t* ids = first.features()[0].ids.data();
  const FeatureBatch second = std::move(first);
  EXPECT_EQ(second.features()[0].ids.data(), ids);
  EXPECT_EQ(second.features()[0].ids[2], 3u);
}

TEST_F(FeatureBatchTest, EmptyBatchOfSamples) {
  const FeatureBatch batch = MakeBatch({{"plain", {}}}, slots_);
  EXPECT_EQ(batch.batch_size(), 0u);
  EXPECT_EQ(batch.features()[0].offsets.size(), 1u);
}

TEST_F(FeatureBatchTest, EveryTruncationIsCorruption) {
  for (size_t size = 0; size < bytes_.size(); ++size) {
    EXPECT_EQ(DecodeStatus(std::span(bytes_).first(size)).code(), StatusCode::kCorruption) << size;
  }
}

// Whatever is decoded from a damaged message can be used; the sanitizers watch.
TEST_F(FeatureBatchTest, DamagedBytesAreRefusedOrHarmless) {
  for (size_t i = 0; i < bytes_.size(); ++i) {
    for (const uint8_t value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
      std::vector<std::byte> damaged = bytes_;
      damaged[i] = std::byte{value};
      const auto batch = FeatureBatch::Decode(ToBuffer(damaged), slots_);
      if (!batch.ok()) continue;
      const LookupPlan plan = LookupPlanner().Make(batch.value(), slots_, 2);
      EXPECT_EQ(plan.num_ids, 3u);  // no single byte can change that and leave the lengths right
    }
  }
}

TEST_F(FeatureBatchTest, UnknownFeatureIsNamed) {
  const Status status = DecodeStatus(EncodeBatch({{"plain", {{1}}}, {"nonsense", {{1}}}}));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("'nonsense'"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("add one"), std::string::npos) << status.message();
}

TEST_F(FeatureBatchTest, MisspelledFeatureGetsTheNearestSlot) {
  for (const char* name : {"plian", "Plain", "plain_id", "plan"}) {
    const Status status = DecodeStatus(EncodeBatch({{name, {{1}}}}));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("did you mean 'plain'?"), std::string::npos)
        << status.message();
  }
  const std::string longest(300, 'p');
  const Status status = DecodeStatus(EncodeBatch({{longest, {{1}}}}));
  EXPECT_EQ(status.message().find("did you mean"), std::string::npos) << status.message();
}

// The encoder refuses such batches, so the messages are made by hand.
TEST_F(FeatureBatchTest, RepeatedFeatureIsNamed) {
  ByteWriter writer;
  for (const uint32_t word : {0x42444950u, 1u, 2u, 1u}) writer.Put(word);
  for (int i = 0; i < 2; ++i) {
    for (const uint32_t word : {5u, 0u, 1u, 0u}) writer.Put(word);
    writer.PutString("plain");
    writer.PutArray(std::span<const uint32_t>(std::vector<uint32_t>{0, 1}));
    writer.PutArray(std::span<const uint64_t>(std::vector<uint64_t>{9}));
  }
  const Status status = DecodeStatus(writer.span());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("'plain'"), std::string::npos) << status.message();
}

TEST_F(FeatureBatchTest, RefusesMoreSignsThanCanBeNumbered) {
  const SlotTable slots = MakeSlots({{.name = "plain", .dim = 1},
                                     {.name = "deep",
                                      .dim = 1,
                                      .hash_stack_rounds = 1u << 31,
                                      .hash_stack_size = 1,
                                      .group = 1}});
  const auto code = [&](const TestBatch& batch) {
    return FeatureBatch::Decode(ToBuffer(EncodeBatch(batch)), slots).status().code();
  };
  EXPECT_EQ(code({{"deep", {{1}}}}), StatusCode::kOk);
  EXPECT_EQ(code({{"deep", {{1, 2}}}}), StatusCode::kInvalidArgument);
}

TEST_F(FeatureBatchTest, RefusesARawIndexThatNoMessageHolds) {
  const SlotTable slots = MakeSlots(
      {{.name = "wide", .dim = 1, .embedding_summation = false, .sample_fixed_size = 65535}});
  const auto status = [&](size_t batch_size) {
    const TestBatch batch = {{"wide", std::vector<std::vector<uint64_t>>(batch_size)}};
    return FeatureBatch::Decode(ToBuffer(EncodeBatch(batch)), slots).status();
  };
  EXPECT_TRUE(status(2048).ok());
  EXPECT_EQ(status(2049).code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status(2049).message().find("'wide'"), std::string::npos);
}

}  // namespace
}  // namespace persia::worker

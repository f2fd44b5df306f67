#include "worker/worker_protocol.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "base/bytes.h"
#include "base/message_test_util.h"

namespace persia::worker {
namespace {

using testing::EncodeToBytes;
using testing::ToBuffer;

constexpr BatchKey kKey{0x1122334455667788, 42};

Segments Encode(float scale, const std::vector<SlotGradient>& gradients) {
  return EncodeMessage(GradientsRequest{kKey, scale, WireDtype::kFloat32, gradients});
}

// Three rows of one element, so that padding is needed; a skipped slot; a shape without rows.
class GradientsRequestTest : public ::testing::Test {
 protected:
  Buffer Body() const { return ToBuffer(testing::Flatten(Encode(128.0f, gradients_))); }

  const std::vector<float> rows_ = {1.5f, -2.0f, 0.25f};
  const std::vector<SlotGradient> gradients_ = {
      {.slot = "age", .num_rows = 3, .dim = 1, .rows = rows_.data()},
      {.slot = "skipped slot", .skipped = true},
      {.slot = "empty", .num_rows = 0, .dim = 8},
      {.slot = "summed",
       .num_rows = 1,
       .dim = 3,
       .rows = rows_.data(),
       .summed = true,
       .max_magnitude = 4.5f},
  };
};

// Bytes of a request with one slot, whose fields can be wrong.
Buffer OneSlot(uint32_t state, uint32_t num_rows, uint32_t dim, uint32_t num_floats) {
  ByteWriter writer;
  writer.Put(kKey);
  writer.Put(1.0f);
  writer.Put(uint32_t{1});
  writer.Put(uint32_t{3});
  writer.Put(state);
  writer.Put(num_rows);
  writer.Put(dim);
  writer.PutString("age");
  const std::vector<float> rows(num_floats, 1.0f);
  writer.PutArray(std::span(rows));
  return ToBuffer(writer.span());
}

TEST_F(GradientsRequestTest, SurvivesTheWire) {
  const Buffer body = Body();
  auto decoded = GradientsRequest::Decode(body.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->key.worker_incarnation, kKey.worker_incarnation);
  EXPECT_EQ(decoded->key.reference, kKey.reference);
  EXPECT_EQ(decoded->scale, 128.0f);
  ASSERT_EQ(decoded->gradients.size(), gradients_.size());
  for (size_t i = 0; i < gradients_.size(); ++i) {
    EXPECT_EQ(decoded->gradients[i].slot, gradients_[i].slot);
    EXPECT_EQ(decoded->gradients[i].skipped, gradients_[i].skipped);
    EXPECT_EQ(decoded->gradients[i].num_rows, gradients_[i].num_rows);
    EXPECT_EQ(decoded->gradients[i].dim, gradients_[i].dim);
    EXPECT_EQ(decoded->gradients[i].summed, gradients_[i].summed);
    EXPECT_EQ(decoded->gradients[i].max_magnitude, gradients_[i].max_magnitude);
  }
  const float* rows = decoded->gradients[0].rows;
  EXPECT_EQ(std::vector<float>(rows, rows + 3), rows_);
}

TEST_F(GradientsRequestTest, NeitherEndCopiesTheRows) {
  const Segments segments = Encode(1.0f, gradients_);
  bool viewed = false;
  for (const auto& view : segments.views) {
    viewed |= view.data() == reinterpret_cast<const std::byte*>(rows_.data());
  }
  EXPECT_TRUE(viewed);
  const Buffer body = ToBuffer(testing::Flatten(segments));
  auto decoded = GradientsRequest::Decode(body.span());
  ASSERT_TRUE(decoded.ok());
  const auto* rows = reinterpret_cast<const std::byte*>(decoded->gradients[0].rows);
  EXPECT_GE(rows, body.data());
  EXPECT_LT(rows, body.data() + body.size());
}

TEST_F(GradientsRequestTest, NoSlotsAtAll) {
  const Buffer body = ToBuffer(testing::Flatten(Encode(2.0f, {})));
  auto decoded = GradientsRequest::Decode(body.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_TRUE(decoded->gradients.empty());
  EXPECT_EQ(decoded->scale, 2.0f);
}

TEST_F(GradientsRequestTest, EveryTruncationIsRefused) {
  const Buffer body = Body();
  for (size_t size = 0; size < body.size(); ++size) {
    auto decoded = GradientsRequest::Decode(body.span().first(size));
    EXPECT_EQ(decoded.status().code(), StatusCode::kCorruption) << size << " bytes";
  }
}

TEST_F(GradientsRequestTest, LeftOverBytesAreRefused) {
  const Buffer body = Body();
  std::vector<std::byte> longer(body.data(), body.data() + body.size());
  longer.resize(longer.size() + 8);
  const Buffer bytes = ToBuffer(longer);
  EXPECT_EQ(GradientsRequest::Decode(bytes.span()).status().code(), StatusCode::kCorruption);
}

TEST_F(GradientsRequestTest, WrongFieldsAreNamed) {
  ASSERT_TRUE(GradientsRequest::Decode(OneSlot(0, 2, 2, 4).span()).ok());
  const Status state = GradientsRequest::Decode(OneSlot(3, 2, 2, 4).span()).status();
  EXPECT_EQ(state.code(), StatusCode::kCorruption);
  EXPECT_NE(state.message().find("slot 'age' has state 3"), std::string::npos);
  const Status shape = GradientsRequest::Decode(OneSlot(1, 2, 2, 0).span()).status();
  EXPECT_EQ(shape.code(), StatusCode::kCorruption);
  EXPECT_NE(shape.message().find("slot 'age' is skipped"), std::string::npos);
}

// Servers refuse what is not finite, and 16 bits would round sums.
TEST_F(GradientsRequestTest, WrongFieldsOfSumsAreNamed) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float max_magnitude : {-1.0f, kNan, std::numeric_limits<float>::infinity()}) {
    SlotGradient gradient = gradients_.back();
    gradient.max_magnitude = max_magnitude;
    const Buffer body = ToBuffer(testing::Flatten(Encode(1.0f, {gradient})));
    const Status status = GradientsRequest::Decode(body.span()).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption);
    EXPECT_NE(status.message().find("'summed': its greatest magnitude"), std::string::npos);
  }
  const Status narrow = GradientsRequest::Decode(OneSlot(2 | 1 << 8, 2, 2, 4).span()).status();
  EXPECT_EQ(narrow.code(), StatusCode::kCorruption);
  EXPECT_NE(narrow.message().find("must be float32"), std::string::npos);
}

TEST_F(GradientsRequestTest, AShapeThatIsNotThereIsRefusedBeforeItIsFollowed) {
  const Buffer body = OneSlot(0, 0xffffffff, 0xffffffff, 4);
  EXPECT_EQ(GradientsRequest::Decode(body.span()).status().code(), StatusCode::kCorruption);
}

TEST(ReturnReportTest, SurvivesTheWireAndNothingShorterDoes) {
  const ReturnReport report{
      {1, 2, 3}, 4, 5, {{.slots = 1, .staleness = 6}, {.slots = 6, .staleness = 7}}};
  const Buffer bytes = ToBuffer(EncodeToBytes(report));
  auto decoded = ReturnReport::Decode(bytes.span());
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->update.staleness, 1u);
  EXPECT_EQ(decoded->update.num_updated, 2u);
  EXPECT_EQ(decoded->update.num_missing, 3u);
  EXPECT_EQ(decoded->num_nonfinite_slots, 4u);
  EXPECT_EQ(decoded->num_skipped_slots, 5u);
  ASSERT_EQ(decoded->lookups.size(), 2u);
  EXPECT_EQ(decoded->lookups[0].slots, 1u);
  EXPECT_EQ(decoded->lookups[0].staleness, 6u);
  EXPECT_EQ(decoded->lookups[1].slots, 6u);
  EXPECT_EQ(decoded->lookups[1].staleness, 7u);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(ReturnReport::Decode(bytes.span().first(size)).status().code(),
              StatusCode::kCorruption);
  }
}

TEST(ReturnReportTest, RefusesMoreLookupsThanThereAreModes) {
  ReturnReport report;
  report.lookups.resize(kMaxSlotModes);
  EXPECT_TRUE(ReturnReport::Decode(ToBuffer(EncodeToBytes(report)).span()).ok());
  report.lookups.emplace_back();
  EXPECT_EQ(ReturnReport::Decode(ToBuffer(EncodeToBytes(report)).span()).status().code(),
            StatusCode::kCorruption);
}

}  // namespace
}  // namespace persia::worker

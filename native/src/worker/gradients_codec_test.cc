#include "worker/gradients_codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/buffer.h"
#include "base/bytes.h"

namespace persia::worker {
namespace {

constexpr Reference kReference{0x1122334455667788, 42};

Buffer Flatten(const net::Parts& parts) {
  Buffer bytes(parts.size_bytes());
  size_t position = 0;
  for (const auto& view : parts.views) {
    if (view.empty()) continue;
    std::memcpy(bytes.data() + position, view.data(), view.size());
    position += view.size();
  }
  return bytes;
}

// Three rows of one element, so that padding is needed; a skipped slot; a shape without rows.
class GradientsCodecTest : public ::testing::Test {
 protected:
  Buffer Encode() const { return Flatten(EncodeGradients(kReference, 128.0f, gradients_)); }

  const std::vector<float> rows_ = {1.5f, -2.0f, 0.25f};
  const std::vector<SlotGradient> gradients_ = {
      {.slot = "age", .num_rows = 3, .dim = 1, .rows = rows_.data()},
      {.slot = "skipped slot", .skipped = true},
      {.slot = "empty", .num_rows = 0, .dim = 8},
  };
};

// Bytes of a request with one slot, whose fields can be wrong.
Buffer OneSlot(uint32_t state, uint32_t num_rows, uint32_t dim, uint32_t num_floats) {
  ByteWriter writer;
  writer.Put(kReference.incarnation);
  writer.Put(kReference.counter);
  writer.Put(1.0f);
  writer.Put(uint32_t{1});
  writer.Put(uint32_t{3});
  writer.Put(state);
  writer.Put(num_rows);
  writer.Put(dim);
  writer.PutString("age");
  const std::vector<float> rows(num_floats, 1.0f);
  writer.PutArray(std::span(rows));
  net::Parts parts;
  parts.AddOwned(writer.Release());
  return Flatten(parts);
}

TEST_F(GradientsCodecTest, SurvivesTheWire) {
  const Buffer body = Encode();
  auto decoded = DecodeGradients(body.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->reference.incarnation, kReference.incarnation);
  EXPECT_EQ(decoded->reference.counter, kReference.counter);
  EXPECT_EQ(decoded->scale, 128.0f);
  ASSERT_EQ(decoded->gradients.size(), gradients_.size());
  for (size_t i = 0; i < gradients_.size(); ++i) {
    EXPECT_EQ(decoded->gradients[i].slot, gradients_[i].slot);
    EXPECT_EQ(decoded->gradients[i].skipped, gradients_[i].skipped);
    EXPECT_EQ(decoded->gradients[i].num_rows, gradients_[i].num_rows);
    EXPECT_EQ(decoded->gradients[i].dim, gradients_[i].dim);
  }
  const float* rows = decoded->gradients[0].rows;
  EXPECT_EQ(std::vector<float>(rows, rows + 3), rows_);
}

TEST_F(GradientsCodecTest, NeitherEndCopiesTheRows) {
  const net::Parts parts = EncodeGradients(kReference, 1.0f, gradients_);
  bool viewed = false;
  for (const auto& view : parts.views) {
    viewed |= view.data() == reinterpret_cast<const std::byte*>(rows_.data());
  }
  EXPECT_TRUE(viewed);
  const Buffer body = Flatten(parts);
  auto decoded = DecodeGradients(body.span());
  ASSERT_TRUE(decoded.ok());
  const auto* rows = reinterpret_cast<const std::byte*>(decoded->gradients[0].rows);
  EXPECT_GE(rows, body.data());
  EXPECT_LT(rows, body.data() + body.size());
}

TEST_F(GradientsCodecTest, NoSlotsAtAll) {
  const Buffer body = Flatten(EncodeGradients(kReference, 2.0f, {}));
  auto decoded = DecodeGradients(body.span());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_TRUE(decoded->gradients.empty());
  EXPECT_EQ(decoded->scale, 2.0f);
}

TEST_F(GradientsCodecTest, EveryTruncationIsRefused) {
  const Buffer body = Encode();
  for (size_t size = 0; size < body.size(); ++size) {
    auto decoded = DecodeGradients(body.span().first(size));
    EXPECT_EQ(decoded.status().code(), StatusCode::kCorruption) << size << " bytes";
  }
}

TEST_F(GradientsCodecTest, LeftOverBytesAreRefused) {
  const Buffer body = Encode();
  std::vector<std::byte> longer(body.data(), body.data() + body.size());
  longer.resize(longer.size() + 8);
  net::Parts parts;
  parts.AddView(longer);
  const Buffer bytes = Flatten(parts);
  EXPECT_EQ(DecodeGradients(bytes.span()).status().code(), StatusCode::kCorruption);
}

TEST_F(GradientsCodecTest, WrongFieldsAreNamed) {
  ASSERT_TRUE(DecodeGradients(OneSlot(0, 2, 2, 4).span()).ok());
  const Status state = DecodeGradients(OneSlot(2, 2, 2, 4).span()).status();
  EXPECT_EQ(state.code(), StatusCode::kCorruption);
  EXPECT_NE(state.message().find("slot 'age' has state 2"), std::string::npos);
  const Status shape = DecodeGradients(OneSlot(1, 2, 2, 0).span()).status();
  EXPECT_EQ(shape.code(), StatusCode::kCorruption);
  EXPECT_NE(shape.message().find("slot 'age' is skipped"), std::string::npos);
}

TEST_F(GradientsCodecTest, AShapeThatIsNotThereIsRefusedBeforeItIsFollowed) {
  const Buffer body = OneSlot(0, 0xffffffff, 0xffffffff, 4);
  EXPECT_EQ(DecodeGradients(body.span()).status().code(), StatusCode::kCorruption);
}

TEST(ReportCodecTest, SurvivesTheWireAndNothingShorterDoes) {
  const ReturnReport report{{1, 2, 3}, 4, 5, {{1, 6}, {6, 7}}};
  const auto bytes = EncodeReport(report);
  auto decoded = DecodeReport(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->update.staleness, 1u);
  EXPECT_EQ(decoded->update.num_updated, 2u);
  EXPECT_EQ(decoded->update.num_missing, 3u);
  EXPECT_EQ(decoded->num_nonfinite_slots, 4u);
  EXPECT_EQ(decoded->num_skipped_slots, 5u);
  ASSERT_EQ(decoded->lookups.size(), 2u);
  EXPECT_EQ(decoded->lookups[0].parts, 1u);
  EXPECT_EQ(decoded->lookups[0].staleness, 6u);
  EXPECT_EQ(decoded->lookups[1].parts, 6u);
  EXPECT_EQ(decoded->lookups[1].staleness, 7u);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeReport(std::span(bytes).first(size)).status().code(), StatusCode::kCorruption);
  }
}

TEST(ReportCodecTest, RefusesMoreLookupsThanThereAreParts) {
  ReturnReport report;
  report.lookups.resize(kMaxParts);
  EXPECT_TRUE(DecodeReport(EncodeReport(report)).ok());
  report.lookups.emplace_back();
  EXPECT_EQ(DecodeReport(EncodeReport(report)).status().code(), StatusCode::kCorruption);
}

}  // namespace
}  // namespace persia::worker

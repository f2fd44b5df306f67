#include "base/row_protocol.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/buffer.h"

namespace persia {
namespace {

const std::vector<RowBlockHeader> kBlocks = {{3, 2}, {1, 1}, {8, 0}};
const std::vector<uint64_t> kSigns = {11, 22, 33};
const std::vector<float> kFloats = {1, 2, 3, 4, 5, 6, 7};

// The bytes as a receiver sees them: one aligned body.
Buffer Join(std::initializer_list<std::span<const std::byte>> parts) {
  size_t size = 0;
  for (const auto& part : parts) size += part.size();
  Buffer body(size);
  size_t position = 0;
  for (const auto& part : parts) {
    if (part.empty()) continue;
    std::memcpy(body.data() + position, part.data(), part.size());
    position += part.size();
  }
  return body;
}

Buffer UpdateBody(const std::vector<RowBlockHeader>& blocks, std::span<const uint64_t> signs,
                  std::span<const float> gradients) {
  const auto head = EncodeUpdateHead({1, 2, 3, 4}, blocks);
  return Join(
      {head, std::as_bytes(signs), std::as_bytes(gradients), ArrayPadding(gradients.size_bytes())});
}

// A copy of a prefix in its own allocation, so that a sanitizer sees reads past it.
Buffer Prefix(const Buffer& body, size_t size) { return Join({body.span().first(size)}); }

TEST(RowProtocolTest, ConfigureRequestRoundTripAndNoOtherSize) {
  TrainConfig config;
  config.optimizer.lr = 0.25f;
  for (const bool replace : {true, false}) {
    auto body = EncodeConfigureRequest(config, replace);
    auto request = DecodeConfigureRequest(body);
    ASSERT_TRUE(request.ok()) << request.status().ToString();
    EXPECT_EQ(request->replace, replace);
    EXPECT_EQ(request->config, config);
    for (size_t size = 0; size < body.size(); ++size) {
      EXPECT_EQ(DecodeConfigureRequest(std::span(body).first(size)).status().code(),
                StatusCode::kCorruption);
    }
    body[0] = std::byte{2};
    EXPECT_EQ(DecodeConfigureRequest(body).status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(RowProtocolTest, LookupRequestRoundTrip) {
  for (const bool train : {true, false}) {
    const auto head = EncodeLookupHead(train, kBlocks);
    const Buffer body = Join({head, std::as_bytes(std::span(kSigns))});
    auto request = DecodeLookupRequest(body.span());
    ASSERT_TRUE(request.ok()) << request.status().ToString();
    EXPECT_EQ(request->train, train);
    ASSERT_EQ(request->blocks.blocks.size(), 3u);
    EXPECT_EQ(request->blocks.blocks[0].dim, 3u);
    EXPECT_EQ(request->blocks.signs[2], 33u);
    EXPECT_EQ(request->blocks.num_floats, 7u);
  }
}

TEST(RowProtocolTest, UpdateRequestRoundTrip) {
  const Buffer body = UpdateBody(kBlocks, kSigns, kFloats);
  auto request = DecodeUpdateRequest(body.span());
  ASSERT_TRUE(request.ok()) << request.status().ToString();
  EXPECT_EQ(request->key.worker_incarnation, 1u);
  EXPECT_EQ(request->key.lookup_counter, 4u);
  ASSERT_EQ(request->gradients.size(), 7u);
  EXPECT_EQ(request->gradients[6], 7.0f);
}

TEST(RowProtocolTest, SetRowsRequestRoundTrip) {
  const auto head = EncodeSetRowsHead(kBlocks);
  const std::span<const float> floats(kFloats);
  const Buffer body = Join({head, std::as_bytes(std::span(kSigns)), std::as_bytes(floats),
                            ArrayPadding(floats.size_bytes())});
  auto request = DecodeSetRowsRequest(body.span());
  ASSERT_TRUE(request.ok()) << request.status().ToString();
  EXPECT_EQ(request->rows[3], 4.0f);
}

TEST(RowProtocolTest, EveryTruncationIsCorruption) {
  const Buffer update = UpdateBody(kBlocks, kSigns, kFloats);
  for (size_t size = 0; size < update.size(); ++size) {
    const Buffer prefix = Prefix(update, size);
    EXPECT_EQ(DecodeUpdateRequest(prefix.span()).status().code(), StatusCode::kCorruption) << size;
  }
  const auto head = EncodeLookupHead(true, kBlocks);
  const Buffer lookup = Join({head, std::as_bytes(std::span(kSigns))});
  for (size_t size = 0; size < lookup.size(); ++size) {
    const Buffer prefix = Prefix(lookup, size);
    EXPECT_EQ(DecodeLookupRequest(prefix.span()).status().code(), StatusCode::kCorruption) << size;
  }
}

TEST(RowProtocolTest, LeftOverBytesAreCorruption) {
  const std::byte extra[8] = {};
  const Buffer update = UpdateBody(kBlocks, kSigns, kFloats);
  const Buffer longer = Join({update.span(), extra});
  EXPECT_EQ(DecodeUpdateRequest(longer.span()).status().code(), StatusCode::kCorruption);
}

TEST(RowProtocolTest, HugeCountsAreCorruptionNotAllocation) {
  constexpr uint32_t kHuge = std::numeric_limits<uint32_t>::max();
  const Buffer many_signs = UpdateBody({{65536, kHuge}, {65536, kHuge}}, kSigns, kFloats);
  EXPECT_EQ(DecodeUpdateRequest(many_signs.span()).status().code(), StatusCode::kCorruption);
  Buffer many_blocks = UpdateBody(kBlocks, kSigns, kFloats);
  std::memcpy(many_blocks.data() + sizeof(UpdateRowsKey), &kHuge, sizeof(kHuge));
  EXPECT_EQ(DecodeUpdateRequest(many_blocks.span()).status().code(), StatusCode::kCorruption);
}

TEST(RowProtocolTest, DimsOutsideTheRangeAreRefusedByName) {
  for (const uint32_t dim : {0u, kMaxRowDim + 1}) {
    const auto head = EncodeLookupHead(true, std::vector<RowBlockHeader>{{1, 0}, {dim, 3}});
    const Buffer body = Join({head, std::as_bytes(std::span(kSigns))});
    const Status status = DecodeLookupRequest(body.span()).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("block 1: dim is " + std::to_string(dim)), std::string::npos);
  }
}

TEST(RowProtocolTest, NonFiniteGradientsAreRefusedWithTheirNumber) {
  std::vector<float> gradients = kFloats;
  gradients[1] = std::nanf("");
  gradients[4] = -std::numeric_limits<float>::infinity();
  const Buffer body = UpdateBody(kBlocks, kSigns, gradients);
  const Status status = DecodeUpdateRequest(body.span()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("2 of 7"), std::string::npos) << status.message();
}

TEST(RowProtocolTest, UnknownLookupModeIsRefused) {
  auto head = EncodeLookupHead(true, {});
  head[0] = std::byte{2};
  const Buffer body = Join({head});
  EXPECT_EQ(DecodeLookupRequest(body.span()).status().code(), StatusCode::kInvalidArgument);
}

TEST(RowProtocolTest, LookupReplyMustHaveExactlyTheRowsAskedFor) {
  const LookupRowsReply head{5, 6};
  const std::span<const float> floats(kFloats);
  const Buffer body = Join({std::as_bytes(std::span(&head, 1)), std::as_bytes(floats),
                            ArrayPadding(floats.size_bytes())});
  std::span<const float> rows;
  auto reply = DecodeLookupReply(body.span(), 7, &rows);
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->update_counter, 6u);
  EXPECT_EQ(rows[6], 7.0f);
  EXPECT_EQ(DecodeLookupReply(body.span(), 5, &rows).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(DecodeLookupReply(body.span(), 9, &rows).status().code(), StatusCode::kCorruption);
}

TEST(RowProtocolTest, FixedRepliesRefuseAnyOtherSize) {
  const UpdateRowsReply update{1, 2, 3};
  const auto bytes = std::as_bytes(std::span(&update, 1));
  auto decoded = DecodeUpdateReply(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->num_missing, 3u);
  EXPECT_FALSE(DecodeUpdateReply(bytes.first(23)).ok());
  EXPECT_FALSE(DecodePingReply(bytes).ok());
}

TEST(RowProtocolTest, PaddingReachesTheNextMultipleOfEight) {
  for (uint64_t size = 0; size < 20; ++size) {
    EXPECT_EQ((size + ArrayPadding(size).size()) % 8, 0u);
    EXPECT_LT(ArrayPadding(size).size(), 8u);
  }
}

}  // namespace
}  // namespace persia

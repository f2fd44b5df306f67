#include "base/row_protocol.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/message_test_util.h"

namespace persia {
namespace {

using testing::EncodeToBytes;
using testing::ToBuffer;

const std::vector<SignBlock> kBlocks = {{3, 2}, {1, 1}, {8, 0}};
const std::vector<uint64_t> kSigns = {11, 22, 33};
const std::vector<float> kFloats = {1, 2, 3, 4, 5, 6, 7};

Buffer LookupBody(const std::vector<SignBlock>& blocks, bool train = true) {
  return ToBuffer(EncodeToBytes(LookupRowsRequest{train, {blocks, kSigns}}));
}

Buffer UpdateBody(const std::vector<SignBlock>& blocks, const std::vector<float>& gradients) {
  return ToBuffer(EncodeToBytes(UpdateRowsRequest{{1, 2}, {3, 4}, {blocks, kSigns}, gradients}));
}

template <typename T>
StatusCode CodeOf(std::span<const std::byte> body) {
  return DecodeMessage<T>(body).status().code();
}

// Every prefix is refused, in an allocation of its own.
template <typename T>
void ExpectTruncationsRefused(const Buffer& body) {
  for (size_t size = 0; size < body.size(); ++size) {
    const Buffer prefix = ToBuffer(body.span().first(size));
    EXPECT_EQ(CodeOf<T>(prefix.span()), StatusCode::kCorruption) << size;
  }
}

TEST(RowProtocolTest, ConfigureRequestRoundTripAndNoOtherSize) {
  TrainConfig config;
  config.optimizer.lr = 0.25f;
  for (const bool replace : {true, false}) {
    Buffer body = ToBuffer(EncodeToBytes(ConfigureRequest{config, replace}));
    auto request = ConfigureRequest::Decode(body.span());
    ASSERT_TRUE(request.ok()) << request.status().ToString();
    EXPECT_EQ(request->replace, replace);
    EXPECT_EQ(request->config, config);
    ExpectTruncationsRefused<ConfigureRequest>(body);
    body.data()[0] = std::byte{2};
    EXPECT_EQ(CodeOf<ConfigureRequest>(body.span()), StatusCode::kInvalidArgument);
  }
}

TEST(RowProtocolTest, LookupRequestRoundTrip) {
  for (const bool train : {true, false}) {
    const Buffer body = LookupBody(kBlocks, train);
    auto request = LookupRowsRequest::Decode(body.span());
    ASSERT_TRUE(request.ok()) << request.status().ToString();
    EXPECT_EQ(request->train, train);
    ASSERT_EQ(request->blocks.blocks.size(), 3u);
    EXPECT_EQ(request->blocks.blocks[0].dim, 3u);
    EXPECT_EQ(request->blocks.signs[2], 33u);
    EXPECT_EQ(request->blocks.num_floats(), 7u);
  }
}

TEST(RowProtocolTest, UpdateRequestRoundTrip) {
  const Buffer body = UpdateBody(kBlocks, kFloats);
  auto request = UpdateRowsRequest::Decode(body.span());
  ASSERT_TRUE(request.ok()) << request.status().ToString();
  EXPECT_EQ(request->key.worker_incarnation, 1u);
  EXPECT_EQ(request->lookup.update_counter, 4u);
  ASSERT_EQ(request->gradients.size(), 7u);
  EXPECT_EQ(request->gradients[6], 7.0f);
}

TEST(RowProtocolTest, SetRowsRequestRoundTrip) {
  const Buffer body = ToBuffer(EncodeToBytes(SetRowsRequest{{kBlocks, kSigns}, kFloats}));
  auto request = SetRowsRequest::Decode(body.span());
  ASSERT_TRUE(request.ok()) << request.status().ToString();
  EXPECT_EQ(request->rows[3], 4.0f);
}

TEST(RowProtocolTest, EveryTruncationIsCorruption) {
  ExpectTruncationsRefused<UpdateRowsRequest>(UpdateBody(kBlocks, kFloats));
  ExpectTruncationsRefused<LookupRowsRequest>(LookupBody(kBlocks));
}

TEST(RowProtocolTest, LeftOverBytesAreCorruption) {
  auto longer = EncodeToBytes(UpdateRowsRequest{{1, 2}, {3, 4}, {kBlocks, kSigns}, kFloats});
  longer.resize(longer.size() + 8);
  EXPECT_EQ(CodeOf<UpdateRowsRequest>(ToBuffer(longer).span()), StatusCode::kCorruption);
}

TEST(RowProtocolTest, HugeCountsAreCorruptionNotAllocation) {
  constexpr uint32_t kHuge = std::numeric_limits<uint32_t>::max();
  const Buffer many_signs = UpdateBody({{65536, kHuge}, {65536, kHuge}}, kFloats);
  EXPECT_EQ(CodeOf<UpdateRowsRequest>(many_signs.span()), StatusCode::kCorruption);
  Buffer many_blocks = UpdateBody(kBlocks, kFloats);
  std::memcpy(many_blocks.data() + sizeof(BatchKey) + sizeof(LookupStamp), &kHuge, sizeof(kHuge));
  EXPECT_EQ(CodeOf<UpdateRowsRequest>(many_blocks.span()), StatusCode::kCorruption);
}

TEST(RowProtocolTest, DimsOutsideTheRangeAreRefusedByName) {
  for (const uint32_t dim : {0u, kMaxRowDim + 1}) {
    const Buffer body = LookupBody({{1, 0}, {dim, 3}});
    const Status status = LookupRowsRequest::Decode(body.span()).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("block 1: dim is " + std::to_string(dim)), std::string::npos);
  }
}

TEST(RowProtocolTest, NonFiniteGradientsAreRefusedWithTheirNumber) {
  std::vector<float> gradients = kFloats;
  gradients[1] = std::nanf("");
  gradients[4] = -std::numeric_limits<float>::infinity();
  const Buffer body = UpdateBody(kBlocks, gradients);
  const Status status = UpdateRowsRequest::Decode(body.span()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("2 of 7"), std::string::npos) << status.message();
}

TEST(RowProtocolTest, UnknownLookupModeIsRefused) {
  Buffer body = ToBuffer(EncodeToBytes(LookupRowsRequest{true, {}}));
  body.data()[0] = std::byte{2};
  EXPECT_EQ(CodeOf<LookupRowsRequest>(body.span()), StatusCode::kInvalidArgument);
}

// A reply whose rows are in memory of their own, as a server's are.
ServerRows Answer() {
  ServerRows answer;
  answer.stamp = {5, 6};
  answer.storage = ToBuffer(std::as_bytes(std::span(kFloats)));
  answer.rows = {reinterpret_cast<const float*>(answer.storage.data()), kFloats.size()};
  return answer;
}

TEST(RowProtocolTest, LookupReplyIsUsedWhereItArrived) {
  Buffer body = ToBuffer(EncodeToBytes(Answer()));
  const std::byte* begin = body.data();
  auto reply = ServerRows::Decode(std::move(body));
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(reply->stamp.incarnation, 5u);
  EXPECT_EQ(reply->stamp.update_counter, 6u);
  EXPECT_EQ(std::vector<float>(reply->rows.begin(), reply->rows.end()), kFloats);
  EXPECT_EQ(reply->storage.data(), begin);
}

TEST(RowProtocolTest, LookupReplyMustHaveExactlyTheRowsThatItTellsOf) {
  const Buffer body = ToBuffer(EncodeToBytes(Answer()));
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(ServerRows::Decode(ToBuffer(body.span().first(size))).ok()) << size;
  }
  for (const uint64_t num_floats : {uint64_t{5}, uint64_t{9}, ~uint64_t{0}}) {
    Buffer other = ToBuffer(body.span());
    std::memcpy(other.data() + sizeof(LookupStamp), &num_floats, sizeof(num_floats));
    EXPECT_EQ(ServerRows::Decode(std::move(other)).status().code(), StatusCode::kCorruption);
  }
}

TEST(RowProtocolTest, MethodNumbersAreUnique) {
  const std::vector<MethodId> methods = {kConfigureServer, kLookupRows, kUpdateRows,  kSetRows,
                                         kClearRows,       kCountRows,  kPrefetchRows};
  for (size_t i = 0; i < methods.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(methods[i].number, methods[j].number) << methods[i].name;
    }
  }
}

}  // namespace
}  // namespace persia

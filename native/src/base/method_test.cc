#include "base/method.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/message_test_util.h"

namespace persia {
namespace {

using testing::EncodeToBytes;
using testing::ToBuffer;

struct Pair {
  uint64_t first = 0;
  uint64_t second = 0;
};

template <typename T>
StatusCode CodeOf(size_t size_bytes) {
  const Buffer body(size_bytes);
  return DecodeMessage<T>(body.span()).status().code();
}

TEST(SegmentsTest, TheyKeepWhatTheyOwn) {
  Segments segments;
  const std::byte outside[3] = {};
  Buffer buffer(5);
  std::memset(buffer.data(), 7, 5);
  segments.AddView(outside);
  segments.AddOwned(std::vector<std::byte>(4, std::byte{6}));
  segments.AddOwned(std::move(buffer));
  const Segments copy = segments;
  segments = Segments();
  EXPECT_EQ(copy.size_bytes(), 12u);
  ASSERT_EQ(copy.views.size(), 3u);
  EXPECT_EQ(copy.views[1][3], std::byte{6});
  EXPECT_EQ(copy.views[2][4], std::byte{7});
}

TEST(SegmentsTest, PaddingReachesTheNextMultipleOfEight) {
  for (uint64_t size = 0; size < 20; ++size) {
    Segments segments;
    const std::vector<char> array(size, 'x');
    segments.AddArray(std::span<const char>(array));
    EXPECT_EQ(segments.size_bytes() % 8, 0u);
    EXPECT_LT(segments.size_bytes() - size, 8u);
  }
}

TEST(MethodTest, AStructIsItsBytesAndNothingElse) {
  const auto bytes = EncodeToBytes(Pair{1, 2});
  auto decoded = DecodeMessage<Pair>(ToBuffer(bytes).span());
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->second, 2u);
  for (const size_t size : {0u, 15u, 17u, 24u}) {
    EXPECT_EQ(CodeOf<Pair>(size), StatusCode::kCorruption) << size;
  }
}

TEST(MethodTest, EmptyHasNoBody) {
  EXPECT_TRUE(EncodeToBytes(Empty()).empty());
  EXPECT_EQ(CodeOf<Empty>(0), StatusCode::kOk);
  EXPECT_EQ(CodeOf<Empty>(1), StatusCode::kCorruption);
}

TEST(MethodTest, ArraysAreTheirElements) {
  const std::vector<uint64_t> values = {7, 8, 9};
  const Buffer body = ToBuffer(EncodeToBytes(values));
  EXPECT_EQ(EncodeToBytes(std::span<const uint64_t>(values)), EncodeToBytes(values));
  auto copied = DecodeMessage<std::vector<uint64_t>>(body.span());
  ASSERT_TRUE(copied.ok());
  EXPECT_EQ(copied.value(), values);
  auto viewed = DecodeMessage<std::span<const uint64_t>>(body.span());
  ASSERT_TRUE(viewed.ok());
  EXPECT_EQ(static_cast<const void*>(viewed->data()), body.data());
  EXPECT_EQ(viewed->size(), 3u);
  EXPECT_EQ(CodeOf<std::vector<uint64_t>>(9), StatusCode::kCorruption);
  EXPECT_EQ(CodeOf<std::span<const uint64_t>>(0), StatusCode::kOk);
}

TEST(MethodTest, ABufferIsHandedOver) {
  Buffer body(40);
  const std::byte* begin = body.data();
  auto decoded = DecodeMessage<Buffer>(std::move(body));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->data(), begin);
  const Segments segments = EncodeMessage<Buffer>(std::move(*decoded));
  ASSERT_EQ(segments.views.size(), 1u);
  EXPECT_EQ(segments.views[0].data(), begin);
}

}  // namespace
}  // namespace persia

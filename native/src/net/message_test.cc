#include "net/message.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "net/client_connection.h"

namespace persia::net {
namespace {

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes Encoded(const FrameHeader& header) {
  HeaderBytes bytes;
  EncodeHeader(header, bytes);
  return bytes;
}

TEST(MessageTest, HeaderRoundTrip) {
  FrameHeader header;
  header.kind = FrameKind::kReply;
  header.method = 17;
  header.status = 4;
  header.request_id = 0x1122334455667788;
  header.deadline_ms = 1500;
  header.body_bytes = 4096;
  auto decoded = DecodeHeader(Encoded(header), 4096);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->kind, FrameKind::kReply);
  EXPECT_EQ(decoded->method, 17);
  EXPECT_EQ(decoded->status, 4);
  EXPECT_EQ(decoded->request_id, 0x1122334455667788u);
  EXPECT_EQ(decoded->deadline_ms, 1500u);
  EXPECT_EQ(decoded->body_bytes, 4096u);
}

// The layout that docs/wire_format.md promises, byte by byte.
TEST(MessageTest, HeaderLayout) {
  FrameHeader header;
  header.method = 17;
  header.request_id = 2;
  header.deadline_ms = 3;
  header.body_bytes = 4;
  const unsigned char expected[kHeaderBytes] = {'P', 'R', 'S', 'A', 2, 1, 17, 0, 2, 0, 0,
                                                0,   0,   0,   0,   0, 3, 0,  0, 0, 0, 0,
                                                0,   0,   4,   0,   0, 0, 0,  0, 0, 0};
  EXPECT_EQ(std::memcmp(Encoded(header).data(), expected, kHeaderBytes), 0);
}

TEST(MessageTest, WrongMagicIsCorruption) {
  FrameHeader header;
  header.magic = 0x20544547;  // "GET "
  EXPECT_EQ(DecodeHeader(Encoded(header), 10).status().code(), StatusCode::kCorruption);
}

TEST(MessageTest, WrongKindIsCorruption) {
  for (const int kind : {0, 3, 255}) {
    FrameHeader header;
    header.kind = static_cast<FrameKind>(kind);
    EXPECT_EQ(DecodeHeader(Encoded(header), 10).status().code(), StatusCode::kCorruption) << kind;
  }
}

TEST(MessageTest, BodyAboveTheLimitIsCorruptionThatNamesBoth) {
  FrameHeader header;
  header.body_bytes = 11;
  EXPECT_TRUE(DecodeHeader(Encoded(header), 11).ok());
  const Status status = DecodeHeader(Encoded(header), 10).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find("11 bytes"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("limit of 10"), std::string::npos) << status.message();
}

TEST(MessageTest, UnknownVersionIsLeftToTheCaller) {
  FrameHeader header;
  header.version = 9;
  auto decoded = DecodeHeader(Encoded(header), 10);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->version, 9);
}

TEST(MessageTest, GarbageNeverPassesWithoutMagicAndLimit) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    HeaderBytes bytes;
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    if (i % 2 == 0) std::memcpy(bytes.data(), &kMagic, sizeof(kMagic));
    auto decoded = DecodeHeader(bytes, 1000);
    if (decoded.ok()) {
      EXPECT_EQ(decoded->magic, kMagic);
      EXPECT_LE(decoded->body_bytes, 1000u);
    }
  }
}

TEST(AddressTest, AcceptsHostsAndPorts) {
  auto name = ParseAddress("worker-0.persia:8887");
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->host, "worker-0.persia");
  EXPECT_EQ(name->port, 8887);
  auto v6 = ParseAddress("[::1]:1");
  ASSERT_TRUE(v6.ok());
  EXPECT_EQ(v6->host, "::1");
}

TEST(AddressTest, RefusesWhatIsNoAddress) {
  for (const char* text :
       {"", "host", ":80", "host:", "host:0", "host:65536", "host:8x", "host:-1", "[]:80"}) {
    EXPECT_EQ(ParseAddress(text).status().code(), StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace persia::net

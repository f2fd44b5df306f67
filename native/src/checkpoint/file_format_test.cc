#include "checkpoint/file_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "checkpoint/checkpoint_test_util.h"

namespace persia::checkpoint {
namespace {

const BlockEntry kEntries[] = {{5, 10, 128, 64, 1}, {9, 2, 192, 80, 2}};

Bytes Footer() { return EncodeFooter(kEntries); }
Bytes Trailer() { return EncodeTrailer({272, 104}, 12); }
Bytes Header() {
  return EncodeHeader({.step = 7,
                       .num_rows = 12,
                       .part = 1,
                       .num_parts = 2,
                       .replica_index = 3,
                       .replica_size = 4,
                       .kind = FileKind::kChanges,
                       .config = ConfigOf(OptimizerKind::kAdam)});
}

template <typename T>
Bytes With(Bytes bytes, size_t offset, T value, size_t checksum_offset) {
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
  const uint64_t checksum = Checksum(bytes, checksum_offset);
  std::memcpy(bytes.data() + checksum_offset, &checksum, sizeof(checksum));
  return bytes;
}

template <typename DecodeBytes>
void ExpectDamageIsSeen(const Bytes& good, DecodeBytes decode) {
  ASSERT_TRUE(decode(good).ok());
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(decode(bad).code(), StatusCode::kCorruption) << "bit " << bit;
  }
  for (size_t size = 0; size < good.size(); ++size) {
    const Bytes bad(good.begin(), good.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_EQ(decode(bad).code(), StatusCode::kCorruption) << size;
  }
}

Status DecodeHeaderOnly(const Bytes& bytes) { return DecodeHeader(bytes).status(); }
Status DecodeFooterOnly(const Bytes& bytes) { return DecodeFooter(bytes).status(); }
Status DecodeTrailerOnly(const Bytes& bytes) { return DecodeTrailer(bytes).status(); }

TEST(Header, ComesBack) {
  Bytes bytes = Header();
  const size_t size = bytes.size();
  bytes.resize(size + 100);  // of what follows in the file
  auto header = DecodeHeader(bytes);
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  EXPECT_EQ(header->step, 7u);
  EXPECT_EQ(header->num_rows, 12u);
  EXPECT_EQ(header->part, 1u);
  EXPECT_EQ(header->num_parts, 2u);
  EXPECT_EQ(header->replica_index, 3u);
  EXPECT_EQ(header->replica_size, 4u);
  EXPECT_EQ(header->kind, FileKind::kChanges);
  EXPECT_EQ(header->config, ConfigOf(OptimizerKind::kAdam));
  EXPECT_EQ(header->header_bytes, size);
}

TEST(Header, DamageIsSeen) { ExpectDamageIsSeen(Header(), &DecodeHeaderOnly); }
TEST(Footer, DamageIsSeen) { ExpectDamageIsSeen(Footer(), &DecodeFooterOnly); }
TEST(Trailer, DamageIsSeen) { ExpectDamageIsSeen(Trailer(), &DecodeTrailerOnly); }

TEST(Footer, ComesBack) {
  const Bytes bytes = Footer();
  auto blocks = DecodeFooter(bytes);
  ASSERT_TRUE(blocks.ok()) << blocks.status().ToString();
  ASSERT_EQ(blocks->size(), 2u);
  EXPECT_EQ(0, std::memcmp(blocks->data(), kEntries, sizeof(kEntries)));
  EXPECT_TRUE(DecodeFooter(EncodeFooter({}))->empty());
}

TEST(Trailer, ComesBack) {
  auto place = DecodeTrailer(Trailer());
  ASSERT_TRUE(place.ok()) << place.status().ToString();
  EXPECT_EQ(place->offset, 272u);
  EXPECT_EQ(place->length, 104u);
}

TEST(Footer, ContradictionsAreSeenBehindAGoodChecksum) {
  constexpr size_t kChecksumAt = 16, kFirst = 40, kSecond = 72;
  for (const Bytes& bytes :
       {With<uint64_t>(Footer(), 24, 3, kChecksumAt),                        // more blocks
        With<uint64_t>(Footer(), 24, 1, kChecksumAt),                        // fewer
        With<uint64_t>(Footer(), 24, UINT64_MAX, kChecksumAt),               //
        With<uint64_t>(Footer(), 32, 13, kChecksumAt),                       // rows in all
        With<uint32_t>(Footer(), kFirst, 4096, kChecksumAt),                 // virtual shard
        With<uint64_t>(Footer(), kSecond + 8, 200, kChecksumAt),             // a gap
        With<uint64_t>(Footer(), kSecond + 16, UINT64_MAX, kChecksumAt)}) {  // beyond all
    EXPECT_EQ(DecodeFooter(bytes).status().code(), StatusCode::kCorruption);
  }
}

TEST(Header, ContradictionsAreSeenBehindAGoodChecksum) {
  for (const Bytes& bytes : {With<uint32_t>(Header(), 56, 3, 16),           // kind
                             With<uint32_t>(Header(), 60, UINT32_MAX, 16),  // config's length
                             With<uint32_t>(Header(), 60, 8, 16),           // cut off
                             With<uint32_t>(Header(), 64, 77, 16)}) {       // config's version
    EXPECT_EQ(DecodeHeader(bytes).status().code(), StatusCode::kCorruption);
  }
}

TEST(Versions, NewerOnesSaySo) {
  for (const Status& status : {DecodeHeader(With<uint32_t>(Header(), 8, 2, 16)).status(),
                               DecodeFooter(With<uint32_t>(Footer(), 8, 2, 16)).status(),
                               DecodeTrailer(With<uint32_t>(Trailer(), 32, 2, 24)).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kCorruption);
    EXPECT_NE(status.message().find("newer persia"), std::string::npos) << status.message();
  }
}

TEST(OtherFiles, AreToldApart) {
  const Bytes other(200, std::byte{'x'});
  EXPECT_NE(DecodeHeader(other).status().message().find("another file"), std::string::npos);
  EXPECT_NE(DecodeFooter(other).status().message().find("another file"), std::string::npos);
  const Bytes end(kTrailerBytes, std::byte{'x'});
  EXPECT_NE(DecodeTrailer(end).status().message().find("another file"), std::string::npos);
}

}  // namespace
}  // namespace persia::checkpoint

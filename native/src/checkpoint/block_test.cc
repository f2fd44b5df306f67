#include "checkpoint/block.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>

#include "base/hash.h"
#include "checkpoint/byte_planes.h"
#include "checkpoint/checkpoint_test_util.h"
#include "checkpoint/file_format.h"

namespace persia::checkpoint {
namespace {

constexpr size_t kHeadBytes = 48;
constexpr size_t kChecksumOffset = 8;

// Signs of one virtual shard.
std::vector<uint64_t> SignsOf(uint32_t virtual_shard, size_t count) {
  std::vector<uint64_t> signs;
  for (uint64_t sign = 0; signs.size() < count; ++sign) {
    if (VirtualShard(SignHash(sign)) == virtual_shard) signs.push_back(sign);
  }
  return signs;
}

BlockRows MakeRows(const BlockShape& shape, size_t count) {
  std::mt19937 random(7);
  BlockRows rows{.shape = shape,
                 .signs = SignsOf(shape.virtual_shard, count),
                 .ages = {},
                 .scalars = {},
                 .values = {}};
  for (size_t i = 0; i < count && shape.kind == BlockKind::kRows; ++i) {
    rows.ages.push_back(static_cast<uint32_t>(random()));
    if (shape.has_scalar) rows.scalars.push_back(static_cast<uint32_t>(random()));
    for (size_t k = 0; k < shape.row_floats(); ++k) {
      rows.values.push_back(static_cast<float>(random()) * 1e-9f - 1.0f);
    }
  }
  return rows;
}

Bytes Encode(const BlockRows& rows) {
  Bytes bytes;
  const Status status = BlockEncoder().Encode(rows, &bytes);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return bytes;
}

Status Decode(const Bytes& bytes, BlockRows* rows) {
  BlockDecoder blocks(bytes);
  PERSIA_RETURN_IF_ERROR(blocks.Next(rows));
  EXPECT_TRUE(blocks.AtEnd());
  return Status::Ok();
}

void ExpectSame(const BlockRows& a, const BlockRows& b) {
  EXPECT_EQ(a.shape, b.shape);
  EXPECT_EQ(a.signs, b.signs);
  EXPECT_EQ(a.ages, b.ages);
  EXPECT_EQ(a.scalars, b.scalars);
  ASSERT_EQ(a.values.size(), b.values.size());
  EXPECT_EQ(0, a.values.empty() ? 0
                                : std::memcmp(a.values.data(), b.values.data(),
                                              a.values.size() * sizeof(float)));
}

const BlockShape kAdamShape{.optimizer = OptimizerKind::kAdam,
                            .virtual_shard = 1234,
                            .dim = 5,
                            .state_floats = 10,
                            .has_scalar = true};

void Rechecksum(Bytes* block) {
  const uint64_t checksum = Checksum(*block, kChecksumOffset);
  std::memcpy(block->data() + kChecksumOffset, &checksum, sizeof(checksum));
}

// A damaged block that pretends to be whole.
template <typename T>
Bytes With(Bytes block, size_t offset, T value) {
  std::memcpy(block.data() + offset, &value, sizeof(value));
  Rechecksum(&block);
  return block;
}

TEST(Block, ComesBack) {
  for (const BlockShape& shape : {kAdamShape, BlockShape{.virtual_shard = 0, .dim = 1},
                                  BlockShape{.optimizer = OptimizerKind::kRowwiseAdagrad,
                                             .virtual_shard = 4095,
                                             .dim = 16,
                                             .has_scalar = true},
                                  BlockShape{.kind = BlockKind::kRemovals, .virtual_shard = 9}}) {
    for (const size_t count : {1, 2, 333}) {
      const BlockRows rows = MakeRows(shape, count);
      const Bytes bytes = Encode(rows);
      EXPECT_EQ(bytes.size() % 8, 0u);
      BlockRows decoded;
      const Status status = Decode(bytes, &decoded);
      ASSERT_TRUE(status.ok()) << status.ToString();
      ExpectSame(decoded, rows);
    }
  }
}

TEST(Block, KeepsEveryBit) {
  BlockRows rows = MakeRows({.virtual_shard = 3, .dim = 4}, 2);
  rows.values = {std::numeric_limits<float>::quiet_NaN(),
                 std::numeric_limits<float>::infinity(),
                 -0.0f,
                 std::numeric_limits<float>::denorm_min(),
                 std::bit_cast<float>(0x7fa00001u),
                 -std::numeric_limits<float>::max(),
                 0.0f,
                 1.0f};
  BlockRows decoded;
  ASSERT_TRUE(Decode(Encode(rows), &decoded).ok());
  ExpectSame(decoded, rows);
}

// Whatever its values, a block takes little more than they do: the widest row, of random bits.
TEST(Block, HasAnyDim) {
  const BlockRows rows = MakeRows({.optimizer = OptimizerKind::kAdagrad,
                                   .virtual_shard = 1,
                                   .dim = 65536,
                                   .state_floats = 65536},
                                  2);
  BlockRows decoded;
  ASSERT_TRUE(Decode(Encode(rows), &decoded).ok());
  ExpectSame(decoded, rows);
}

TEST(Block, FollowOneAnother) {
  Bytes chunk = Encode(MakeRows(kAdamShape, 3));
  const size_t first_size = chunk.size();
  const BlockRows second = MakeRows({.virtual_shard = 7, .dim = 2}, 4);
  ASSERT_TRUE(BlockEncoder().Encode(second, &chunk).ok());
  EXPECT_EQ(ChecksumOfBlock(std::span(chunk).first(first_size)),
            Checksum(std::span(chunk).first(first_size), kChecksumOffset));
  BlockDecoder blocks(chunk);
  BlockRows rows;
  ASSERT_TRUE(blocks.Next(&rows).ok());
  EXPECT_EQ(rows.signs.size(), 3u);
  ASSERT_TRUE(blocks.Next(&rows).ok());
  ExpectSame(rows, second);
  EXPECT_TRUE(blocks.AtEnd());
}

TEST(Block, EveryFlippedBitIsSeen) {
  const Bytes good = Encode(MakeRows(kAdamShape, 3));
  BlockRows rows;
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    const Status status = Decode(bad, &rows);
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << "bit " << bit;
  }
}

TEST(Block, EveryTruncationIsSeen) {
  const Bytes good = Encode(MakeRows(kAdamShape, 3));
  BlockRows rows;
  for (size_t size = 1; size < good.size(); ++size) {
    const Bytes bad(good.begin(), good.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_EQ(Decode(bad, &rows).code(), StatusCode::kCorruption) << size;
  }
}

TEST(Block, ContradictionsAreSeenBehindAGoodChecksum) {
  const Bytes good = Encode(MakeRows(kAdamShape, 3));
  const struct {
    const char* field;
    Bytes bytes;
  } cases[] = {
      {"kind", With<uint8_t>(good, 6, 2)},
      {"removals with a dim", With<uint8_t>(good, 6, 1)},
      {"virtual_shard", With<uint32_t>(good, 16, 4096)},
      {"another virtual_shard", With<uint32_t>(good, 16, 1235)},
      {"dim", With<uint32_t>(good, 20, 6)},
      {"dim of 0", With<uint32_t>(good, 20, 0)},
      {"huge dim", With<uint32_t>(good, 20, UINT32_MAX)},
      {"state_floats", With<uint32_t>(good, 24, 11)},
      {"huge state_floats", With<uint32_t>(good, 24, UINT32_MAX)},
      {"num_rows", With<uint32_t>(good, 28, 4)},
      {"no rows", With<uint32_t>(good, 28, 0)},
      {"huge num_rows", With<uint32_t>(good, 28, UINT32_MAX)},
      {"has_scalar", With<uint8_t>(good, 32, 0)},
      {"has_scalar of 2", With<uint8_t>(good, 32, 2)},
      {"embedding_type", With<uint8_t>(good, 33, 1)},
      {"reserved", With<uint16_t>(good, 34, 1)},
      {"columns_bytes", With<uint64_t>(good, 40, 8)},
      {"huge columns_bytes", With<uint64_t>(good, 40, UINT64_MAX)},
      {"payload", With<uint64_t>(good, kHeadBytes, 0)},
  };
  for (const auto& [field, bytes] : cases) {
    BlockRows rows;
    const Status status = Decode(bytes, &rows);
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << field;
  }
}

TEST(Block, OfANewerVersionSaysSo) {
  BlockRows rows;
  const Status status = Decode(With<uint16_t>(Encode(MakeRows(kAdamShape, 3)), 4, 2), &rows);
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find("newer persia"), std::string::npos) << status.message();
}

TEST(Block, OfAnotherFileSaysSo) {
  BlockRows rows;
  const Status status = Decode(Bytes(4096, std::byte{'x'}), &rows);
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find("does not begin like a block"), std::string::npos);
}

TEST(BytePlanes, AreBytesInOrder) {
  const float values[] = {std::bit_cast<float>(0x04030201u), std::bit_cast<float>(0x14131211u)};
  std::byte planes[8];
  SplitIntoPlanes(values, 2, planes);
  for (const auto& [at, expected] : {std::pair{0, 0x01}, {1, 0x11}, {2, 0x02}, {7, 0x14}}) {
    EXPECT_EQ(planes[at], std::byte(expected)) << at;
  }
}

}  // namespace
}  // namespace persia::checkpoint

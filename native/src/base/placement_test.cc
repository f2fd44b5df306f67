#include "base/placement.h"

#include <gtest/gtest.h>

#include <vector>

namespace persia {
namespace {

TEST(PlacementTest, IsByHashWhereNoShardIsMoved) {
  for (const uint32_t num_servers : {1u, 2u, 7u, 5000u}) {
    const Placement placement(num_servers);
    EXPECT_EQ(placement.num_servers(), num_servers);
    EXPECT_TRUE(placement.moved().empty());
    for (uint64_t sign = 0; sign < 100; ++sign) {
      const uint32_t shard = VirtualShard(SignHash(sign));
      EXPECT_EQ(placement.ServerOf(SignHash(sign)), shard % num_servers);
    }
  }
}

TEST(PlacementTest, MovedShardsAreElsewhere) {
  const std::vector<MovedShard> moved = {{0, 2}, {4095, 1}};
  const Placement placement = Placement::Create(3, 4, moved).value();
  EXPECT_EQ(placement.ServerOfShard(0), 2u);
  EXPECT_EQ(placement.ServerOfShard(4095), 1u);
  EXPECT_EQ(placement.ServerOfShard(3), 0u);
  ShardSet all;
  size_t num_shards = 0;
  for (uint32_t server = 0; server < 3; ++server) {
    all |= placement.ShardsOf(server);
    num_shards += placement.ShardsOf(server).count();
  }
  EXPECT_TRUE(all.all());
  EXPECT_EQ(num_shards, kNumVirtualShards);
  EXPECT_TRUE(placement.ShardsOf(2).test(0));
}

TEST(PlacementTest, EqualsOneOfTheSameServersAndShards) {
  const std::vector<MovedShard> moved = {{0, 1}};
  const Placement placement = Placement::Create(2, 1, moved).value();
  EXPECT_EQ(placement, Placement::Create(2, 1, moved).value());
  EXPECT_NE(placement, Placement::Create(2, 2, moved).value());
  EXPECT_NE(placement, Placement::Create(2, 1, {}).value());
  EXPECT_NE(Placement(2), Placement(3));
  EXPECT_EQ(Placement(2), Placement::Create(2, 0, {}).value());
}

TEST(PlacementTest, RefusesShardsAndServersThatDoNotExist) {
  using Moved = std::vector<MovedShard>;
  for (const Moved& moved : {Moved{{4096, 0}}, Moved{{0, 2}}, Moved{{7, 0}, {7, 1}}}) {
    EXPECT_EQ(Placement::Create(2, 0, moved).status().code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace persia

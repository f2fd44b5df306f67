#include "server/shard_loads.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace persia::server {
namespace {

uint64_t Counted(const ShardLoads& loads) {
  const std::vector<uint64_t> counts = loads.counts();
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

TEST(ShardLoadsTest, CountsOfAnOldJobStillTellTheLoadOfOneServerByThatOfAnother) {
  ShardLoads busy, idle;
  std::vector<uint64_t> signs(100'000);
  std::iota(signs.begin(), signs.end(), 1);
  for (int request = 0; request < 17 * 70; ++request) busy.Count(signs);
  for (int request = 0; request < 17 * 30; ++request) idle.Count(signs);
  EXPECT_EQ(Counted(busy), 7'000'000);
  EXPECT_EQ(Counted(idle), 3'000'000);
}

}  // namespace
}  // namespace persia::server

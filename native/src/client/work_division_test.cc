#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "client/embedding_bags.h"

namespace persia::client {
namespace {

std::vector<size_t> EndsOf(std::span<const double> costs, size_t num_runs) {
  std::vector<size_t> ends;
  for (const WorkRun& run : DivideWork(costs, num_runs)) ends.push_back(run.end);
  return ends;
}

TEST(DivideWorkTest, RunsCostAboutTheSame) {
  const std::vector<double> alike(6, 1.0);
  EXPECT_EQ(EndsOf(alike, 2), (std::vector<size_t>{3, 6}));
  EXPECT_EQ(EndsOf(alike, 4), (std::vector<size_t>{2, 3, 5, 6}));
  const std::vector<double> front_heavy = {5, 5, 5, 1, 2, 1, 1, 5, 5};
  EXPECT_EQ(EndsOf(front_heavy, 2), (std::vector<size_t>{3, 9}));
}

TEST(DivideWorkTest, EveryPieceIsInOneRunAndNoRunIsEmpty) {
  std::mt19937 random(3);
  std::uniform_int_distribution<size_t> few(1, 12);
  std::uniform_real_distribution<double> cost(0.0, 10.0);
  for (int i = 0; i < 1000; ++i) {
    std::vector<double> costs(few(random));
    for (double& one : costs) one = few(random) < 3 ? 0.0 : cost(random);
    const size_t wanted = few(random);
    const std::vector<WorkRun> runs = DivideWork(costs, wanted);
    ASSERT_EQ(runs.size(), std::min(wanted, costs.size()));
    ASSERT_EQ(runs.back().end, costs.size());
    const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
    const double largest = *std::max_element(costs.begin(), costs.end());
    for (size_t r = 0; r < runs.size(); ++r) {
      ASSERT_LT(runs[r].begin, runs[r].end);
      ASSERT_EQ(runs[r].begin, r == 0 ? 0 : runs[r - 1].end);
      const double sum = std::accumulate(costs.begin() + static_cast<ptrdiff_t>(runs[r].begin),
                                         costs.begin() + static_cast<ptrdiff_t>(runs[r].end), 0.0);
      // Each end is off its place by half a piece at most, or there were only as many pieces left.
      if (costs.size() >= 4 * wanted) {
        ASSERT_LE(sum, total / static_cast<double>(wanted) + 2 * largest);
      }
    }
  }
}

TEST(DivideWorkTest, NothingIsNoRun) { EXPECT_TRUE(DivideWork({}, 3).empty()); }

}  // namespace
}  // namespace persia::client

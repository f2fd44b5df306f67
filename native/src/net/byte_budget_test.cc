#include "net/byte_budget.h"

#include <gtest/gtest.h>

#include <vector>

namespace persia::net {
namespace {

TEST(ByteBudgetTest, GrantsUpToTheLimitThenWaits) {
  ByteBudget budget(100);
  bool granted = false;
  EXPECT_TRUE(budget.Acquire(60, [] {}));
  EXPECT_TRUE(budget.Acquire(40, [] {}));
  EXPECT_FALSE(budget.Acquire(1, [&] { granted = true; }));
  EXPECT_FALSE(granted);
  budget.Release(40);
  EXPECT_TRUE(granted);
}

TEST(ByteBudgetTest, LargeWaiterIsNotOvertaken) {
  ByteBudget budget(100);
  std::vector<int> order;
  EXPECT_TRUE(budget.Acquire(60, [] {}));
  EXPECT_FALSE(budget.Acquire(90, [&] { order.push_back(1); }));
  EXPECT_FALSE(budget.Acquire(10, [&] { order.push_back(2); }));  // would fit, but came later
  budget.Release(60);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(ByteBudgetTest, BodyAboveTheBudgetGoesAlone) {
  ByteBudget budget(100);
  bool granted = false;
  EXPECT_TRUE(budget.Acquire(500, [] {}));
  EXPECT_FALSE(budget.Acquire(1, [&] { granted = true; }));
  budget.Release(500);
  EXPECT_TRUE(granted);
}

TEST(ByteBudgetTest, LeaseReleasesOnce) {
  ByteBudget budget(10);
  int num_granted = 0;
  ASSERT_TRUE(budget.Acquire(10, [] {}));
  {
    ByteLease lease(&budget, 10);
    ByteLease moved = std::move(lease);
    EXPECT_FALSE(budget.Acquire(10, [&] { ++num_granted; }));
    EXPECT_EQ(num_granted, 0);
  }
  EXPECT_EQ(num_granted, 1);
  EXPECT_FALSE(budget.Acquire(1, [] {}));  // the waiter holds all of it
}

TEST(ByteBudgetTest, DroppedWaitersAreNotRun) {
  ByteBudget budget(10);
  bool granted = false;
  ASSERT_TRUE(budget.Acquire(10, [] {}));
  EXPECT_FALSE(budget.Acquire(10, [&] { granted = true; }));
  budget.DropWaiters();
  budget.Release(10);
  EXPECT_FALSE(granted);
}

}  // namespace
}  // namespace persia::net

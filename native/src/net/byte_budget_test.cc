#include "net/byte_budget.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

namespace persia::net {
namespace {

// A body that takes bytes, and gets them later where they did not fit.
struct Body {
  bool Take(ByteBudget& budget, uint64_t bytes) {
    has_them = budget.Acquire(bytes, &lease, [this](ByteLease granted) {
      lease = std::move(granted);
      has_them = true;
    });
    return has_them;
  }
  void End() { lease = ByteLease(); }

  ByteLease lease;
  bool has_them = false;
};

TEST(ByteBudgetTest, GrantsUpToTheLimitThenWaits) {
  ByteBudget budget(100);
  Body first, second, third;
  EXPECT_TRUE(first.Take(budget, 60));
  EXPECT_TRUE(second.Take(budget, 40));
  EXPECT_FALSE(third.Take(budget, 1));
  second.End();
  EXPECT_TRUE(third.has_them);
}

TEST(ByteBudgetTest, ALargeWaiterIsNotOvertaken) {
  ByteBudget budget(100);
  Body first, large, small;
  EXPECT_TRUE(first.Take(budget, 60));
  EXPECT_FALSE(large.Take(budget, 90));
  EXPECT_FALSE(small.Take(budget, 10));  // would fit, but came later
  first.End();
  EXPECT_TRUE(large.has_them);
  EXPECT_TRUE(small.has_them);
}

TEST(ByteBudgetTest, AStepAboveTheBudgetGoesAlone) {
  ByteBudget budget(100);
  Body large, other;
  EXPECT_TRUE(large.Take(budget, 500));
  EXPECT_FALSE(other.Take(budget, 1));
  large.End();
  EXPECT_TRUE(other.has_them);
}

// Two bodies hold half each and need more. One of them passes the limit, and ends.
TEST(ByteBudgetTest, BodiesThatHaveBegunDoNotBlockOneAnother) {
  ByteBudget budget(100);
  Body first, second, third;
  EXPECT_TRUE(first.Take(budget, 50));
  EXPECT_TRUE(second.Take(budget, 50));
  EXPECT_TRUE(first.Take(budget, 50));
  EXPECT_FALSE(second.Take(budget, 50));  // one at a time
  EXPECT_TRUE(first.Take(budget, 50));    // until it ends
  EXPECT_FALSE(third.Take(budget, 1));    // has not begun
  first.End();
  EXPECT_TRUE(second.has_them);
  second.End();
  EXPECT_TRUE(third.has_them);
}

TEST(ByteBudgetTest, TheOverdraftPassesToABodyBehindOneThatHasNotBegun) {
  ByteBudget budget(100);
  Body first, second, fresh;
  EXPECT_TRUE(first.Take(budget, 50));
  EXPECT_TRUE(second.Take(budget, 50));
  EXPECT_TRUE(first.Take(budget, 10));
  EXPECT_FALSE(fresh.Take(budget, 90));
  EXPECT_FALSE(second.Take(budget, 60));
  first.End();
  EXPECT_TRUE(second.has_them);
  EXPECT_FALSE(fresh.has_them);
  second.End();
  EXPECT_TRUE(fresh.has_them);
}

TEST(ByteBudgetTest, ALeaseReleasesOnce) {
  ByteBudget budget(10);
  Body first, waiting, last;
  ASSERT_TRUE(first.Take(budget, 10));
  EXPECT_FALSE(waiting.Take(budget, 10));
  {
    const ByteLease moved = std::move(first.lease);
    EXPECT_FALSE(waiting.has_them);
  }
  EXPECT_TRUE(waiting.has_them);
  EXPECT_FALSE(last.Take(budget, 1));  // the waiter holds all of it
  budget.DropWaiters();
}

TEST(ByteBudgetTest, DroppedWaitersAreNotRun) {
  ByteBudget budget(10);
  Body first, waiting;
  ASSERT_TRUE(first.Take(budget, 10));
  EXPECT_FALSE(waiting.Take(budget, 10));
  budget.DropWaiters();
  first.End();
  EXPECT_FALSE(waiting.has_them);
}

}  // namespace
}  // namespace persia::net

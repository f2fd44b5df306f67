#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "worker/slot_table.h"

namespace persia::worker {
namespace {

SlotTable TwoSlots() {
  return SlotTable::Create(
             8, {{.name = "user", .dim = 8, .group = 0}, {.name = "item", .dim = 8, .group = 1}})
      .value();
}

double Ratio(const SlotStats& stats, std::string_view key) {
  for (const Metric& metric : stats.metrics) {
    if (metric.info.key == key) return metric.ratio;
  }
  return -1;
}

TEST(SlotCounters, EachSlotHasItsOwn) {
  const SlotTable slots = TwoSlots();
  SlotCounters counters(slots);
  const std::vector<uint64_t> first = {1, 2, 3}, second = {3};
  counters.LookedUp(*slots.Find("item"), 6, first);
  counters.LookedUp(*slots.Find("item"), 4, second);
  counters.LookedUp(*slots.Find("item"), 0, {});  // no IDs: the latest ratio stays
  counters.Nonfinite(*slots.Find("item"));
  counters.Skipped(*slots.Find("user"));
  const std::vector<SlotStats> stats = counters.stats();
  ASSERT_EQ(stats.size(), 2u);
  EXPECT_EQ(stats[0].name, "user");
  EXPECT_EQ(stats[0].metrics["num_ids"], 0u);
  EXPECT_EQ(stats[0].metrics["num_skipped"], 1u);
  EXPECT_EQ(stats[1].name, "item");
  EXPECT_EQ(stats[1].metrics["num_ids"], 10u);
  EXPECT_EQ(stats[1].metrics["num_distinct"], 4u);
  EXPECT_DOUBLE_EQ(Ratio(stats[1], "last_distinct_ratio"), 0.25);
  EXPECT_NEAR(Ratio(stats[1], "estimated_distinct"), 3, 0.1);
  EXPECT_EQ(stats[1].metrics["num_nonfinite"], 1u);
}

TEST(SlotCounters, OneBatchIn32IsSampledOnceTheFirstOnesWereSeen) {
  const SlotTable slots = TwoSlots();
  SlotCounters counters(slots);
  uint64_t next = 0;
  const auto look_up = [&](int num_batches) {
    for (int i = 0; i < num_batches; ++i) {
      const std::vector<uint64_t> ids = {next, next + 1};
      next += 2;
      counters.LookedUp(*slots.Find("user"), 2, ids);
    }
  };
  look_up(64);
  EXPECT_NEAR(Ratio(counters.stats()[0], "estimated_distinct"), 128, 5);
  look_up(320);  // ten of them count
  EXPECT_NEAR(Ratio(counters.stats()[0], "estimated_distinct"), 128 + 20, 6);
  EXPECT_EQ(counters.stats()[0].metrics["num_distinct"], 768u);  // counted of all
}

}  // namespace
}  // namespace persia::worker

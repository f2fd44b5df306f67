// Expiry: which rows go by time to live, when, and how much is done at a time.
#include "store/expiry.h"

#include <gtest/gtest.h>

#include <set>

namespace persia::store {
namespace {

using std::chrono::duration_cast;
using Time = Expiry::Time;

Time At(double seconds) {
  // Not 0: a clock has run before.
  return Time{} + duration_cast<Time::duration>(std::chrono::duration<double>(1000 + seconds));
}

RowPolicies RulesOf(float time_to_live_sec) {
  TrainConfig config;
  config.time_to_live_sec = time_to_live_sec;
  return RowPolicies(config);
}

class ExpiryTest : public testing::Test {
 protected:
  void Use(uint64_t key, uint32_t stamp) {
    if (auto* entry = index_.Find(key); entry != nullptr) {
      entry->stamp = stamp;
    } else {
      EXPECT_TRUE(index_.Insert({key, 0, stamp}));
    }
  }
  size_t Step(const RowPolicies& rules, uint32_t stamp, double seconds) {
    const auto expired = expiry_.Step(index_, rules, stamp, At(seconds));
    for (const uint64_t key : expired) {
      index_.Erase(index_.Find(key));
      went_.insert(key);
    }
    return expired.size();
  }

  SignIndex index_;
  Expiry expiry_;
  std::set<uint64_t> went_;
};

TEST_F(ExpiryTest, RowsGoAfterTheirTimeNeverBeforeAndAtMostAThirdLate) {
  const RowPolicies rules = RulesOf(100);
  expiry_.SetShortest(rules.ShortestTimeToLive());
  // Ten batches a second; key k is used once, in second k.
  for (uint32_t batch = 1; batch <= 4000; ++batch) {
    const double now = batch / 10.0;
    Step(rules, batch, now);
    if (batch % 10 == 0) Use(batch / 10, batch);
    const uint64_t oldest = went_.size() + 1;  // keys go in order, for walks do not split a second
    EXPECT_FALSE(went_.contains(static_cast<uint64_t>(now)));
    if (!went_.empty()) {
      EXPECT_LE(static_cast<double>(*went_.rbegin()) + 100, now) << batch;
    }
    if (now > 140) {
      EXPECT_GE(static_cast<double>(oldest) + 135, now) << batch;
    }
  }
}

TEST_F(ExpiryTest, UseKeepsARowAndForgettingBeginsAnew) {
  const RowPolicies rules = RulesOf(10);
  expiry_.SetShortest(10);
  Use(1, 0);
  Use(2, 0);
  for (uint32_t batch = 1; batch <= 60; ++batch) {
    Step(rules, batch, batch);
    Use(1, batch);
  }
  EXPECT_EQ(went_, (std::set<uint64_t>{2}));
  Use(3, 60);
  expiry_.Forget();
  for (uint32_t batch = 61; batch <= 69; ++batch) Step(rules, batch, batch);
  EXPECT_EQ(index_.size(), 2u);
  for (uint32_t batch = 70; batch <= 80; ++batch) Step(rules, batch, batch);
  EXPECT_EQ(index_.size(), 0u);
}

TEST_F(ExpiryTest, EachGroupHasItsOwnTime) {
  TrainConfig config;
  config.feature_index_prefix_bit = 8;
  for (const auto& [group, seconds] : {std::pair{1u, 5.0f}, {2u, 50.0f}}) {
    RowConfig rows;
    rows.time_to_live_sec = seconds;
    config.groups.push_back({group, rows});
  }
  const RowPolicies rules(config);
  EXPECT_EQ(rules.ShortestTimeToLive(), 5.0);
  expiry_.SetShortest(5);
  const auto key = [](uint64_t group) { return SignKey((group << 56) + 7); };
  for (const uint64_t group : {1, 2, 3}) Use(key(group), 0);
  for (uint32_t batch = 1; batch <= 30; ++batch) Step(rules, batch, batch);
  EXPECT_EQ(went_, (std::set<uint64_t>{key(1)}));
  for (uint32_t batch = 31; batch <= 300; ++batch) Step(rules, batch, batch);
  EXPECT_EQ(went_, (std::set<uint64_t>{key(1), key(2)})) << "the third has no time to live";
}

TEST_F(ExpiryTest, ABatchDoesABoundedPartOfTheWork) {
  const RowPolicies rules = RulesOf(1);
  expiry_.SetShortest(1);
  for (uint64_t sign = 0; sign < 100'000; ++sign) Use(SignKey(sign), 0);
  Step(rules, 1, 0);
  EXPECT_EQ(Step(rules, 2, 1000), Expiry::kMaxExpired);  // all are due
  uint32_t batch = 3;
  while (index_.size() > 0 && batch < 10'000) Step(rules, batch, 1000.0 + batch), ++batch;
  EXPECT_EQ(index_.size(), 0u);
  EXPECT_GE(batch, 100'000 / Expiry::kMaxExpired);
}

TEST_F(ExpiryTest, MarksOfMonthsTakeLittleMemory) {
  const RowPolicies rules = RulesOf(60);
  expiry_.SetShortest(60);
  for (uint32_t batch = 1; batch <= 100'000; ++batch) Step(rules, batch, batch * 50.0);
  EXPECT_LT(expiry_.memory_bytes(), 32u << 10);
}

}  // namespace
}  // namespace persia::store

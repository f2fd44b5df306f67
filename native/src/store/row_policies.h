// RowPolicies: the row policies of all feature groups of a train config.
//
// A row's policy follows from its sign, whose top bits are its group's number: nothing is kept in
// the row (ADR 8). Immutable, hence thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "base/train_config.h"
#include "store/row_policy.h"
#include "store/sign_index.h"

namespace persia::store {

class RowPolicies {
 public:
  // `dtype` is that of the rows; policies that are only checked need none.
  explicit RowPolicies(const TrainConfig& config, RowDtype dtype = RowDtype::kFloat32);

  const RowPolicy& Of(uint64_t sign) const {
    if (by_group_.empty()) return policies_[0];
    const uint64_t group = sign >> sign_shift_;
    return group < by_group_.size() ? *by_group_[group] : policies_[0];
  }
  const RowPolicy& OfKey(uint64_t key) const {
    return by_group_.empty() ? policies_[0] : Of(SignOfKey(key));
  }
  uint32_t GroupOfKey(uint64_t key) const {
    return by_group_.empty() ? 0 : static_cast<uint32_t>(SignOfKey(key) >> sign_shift_);
  }
  // Groups with a capacity of their own, by rising number.
  std::vector<std::pair<uint32_t, uint64_t>> capacities() const;
  // Whether any group counts how often it sees a sign.
  bool CountsSightings() const;
  // Seconds, of any group; 0: all rows stay.
  double ShortestTimeToLive() const;

 private:
  std::deque<RowPolicy> policies_;          // the common ones first
  std::vector<const RowPolicy*> by_group_;  // empty where all rows have the common ones
  uint32_t sign_shift_ = 0;
};

}  // namespace persia::store

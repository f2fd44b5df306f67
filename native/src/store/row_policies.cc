#include "store/row_policies.h"

#include <algorithm>

namespace persia::store {

RowPolicies::RowPolicies(const TrainConfig& config, RowDtype dtype) {
  policies_.emplace_back(config, dtype);
  if (config.groups.empty()) return;
  sign_shift_ = 64 - config.feature_index_prefix_bit;
  by_group_.assign(size_t{config.groups.back().group} + 1, &policies_[0]);
  for (const GroupConfig& group : config.groups) {
    by_group_[group.group] = &policies_.emplace_back(group.rows, dtype);
  }
}

bool RowPolicies::CountsSightings() const {
  return std::any_of(policies_.begin(), policies_.end(),
                     [](const RowPolicy& policies) { return policies.admit_after() > 1; });
}

std::vector<std::pair<uint32_t, uint64_t>> RowPolicies::capacities() const {
  std::vector<std::pair<uint32_t, uint64_t>> capacities;
  for (uint32_t group = 0; group < by_group_.size(); ++group) {
    const uint64_t capacity = by_group_[group]->capacity();
    if (capacity > 0) capacities.emplace_back(group, capacity);
  }
  return capacities;
}

double RowPolicies::ShortestTimeToLive() const {
  double shortest = 0;
  for (const RowPolicy& policies : policies_) {
    const double time_to_live = policies.time_to_live_sec();
    if (time_to_live > 0 && (shortest == 0 || time_to_live < shortest)) shortest = time_to_live;
  }
  return shortest;
}

}  // namespace persia::store

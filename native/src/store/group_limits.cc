#include "store/group_limits.h"

#include <algorithm>
#include <utility>

namespace persia::store {

void GroupLimits::SetPolicies(const RowPolicies& policies, const SignIndex& index, uint32_t number,
                              uint32_t num_shards) {
  policies_ = &policies;
  limits_.clear();
  number_of_group_.clear();
  for (const auto& [group, capacity] : policies.capacities()) {
    number_of_group_.resize(size_t{group} + 1, kNone);
    number_of_group_[group] = static_cast<uint32_t>(limits_.size());
    const uint64_t share = capacity / num_shards + (number < capacity % num_shards ? 1 : 0);
    limits_.push_back(
        {.share = share,
         .victims = VictimQueue([&policies, group = group](const SignIndex::Entry& entry) {
           return policies.GroupOfKey(entry.key) == group;
         })});
  }
  // Rows of before, as a change of config may turn a limit on.
  if (is_on()) index.ForEach([this](const SignIndex::Entry& entry) { CountInsert(entry.key); });
}

void GroupLimits::CountClear() {
  for (Limit& limit : limits_) limit.num_rows = 0;
  ForgetVictims();
}

void GroupLimits::ExpectNothing() {
  for (Limit& limit : limits_) limit.num_expected = 0;
}

// The first group that is over its share; the caller removes a row of it and asks again.
SignIndex::Entry* GroupLimits::NextVictim(const SignIndex& index) {
  for (Limit& limit : limits_) {
    if (limit.num_rows > 0 && limit.num_rows + limit.num_expected > limit.share) {
      return limit.victims.Pop(index);
    }
  }
  return nullptr;
}

// Then even evicting all of its older rows leaves no room for the batch.
bool GroupLimits::HasTooMany() const {
  return std::any_of(limits_.begin(), limits_.end(),
                     [](const Limit& limit) { return limit.num_expected > limit.share; });
}

// Each group has an order of its own, found by a pass over the whole index.
void GroupLimits::ForgetVictims() {
  for (Limit& limit : limits_) limit.victims.Clear();
}

uint64_t GroupLimits::memory_bytes() const {
  uint64_t bytes = number_of_group_.capacity() * sizeof(uint32_t);
  for (const Limit& limit : limits_) bytes += sizeof(Limit) + limit.victims.memory_bytes();
  return bytes;
}

}  // namespace persia::store

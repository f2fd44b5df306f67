// GroupLimits: how many rows of a shard belong to each feature group that has a capacity, and which
// of them are evicted first.
//
// A group's rows are counted when they are inserted and removed; a row's sign tells its group, so
// that nothing is kept for each row. Finding the oldest rows of a group passes over the index of
// the whole shard, once for a quarter of the group's rows: a group should not be many times smaller
// than the store.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/row_policy.h"
#include "store/sign_index.h"
#include "store/victim_queue.h"

namespace persia::store {

class GroupLimits {
 public:
  // Of shard `number` of `num_shards`, which divide capacities among them. Counts what there is.
  // `policies` must outlive this, or the next call.
  void SetPolicies(const RowPolicies& policies, const SignIndex& index, uint32_t number,
                   uint32_t num_shards);
  bool is_on() const { return !limits_.empty(); }

  // RowFeatures' hooks call them for each row that the shard inserts or removes.
  void CountInsert(uint64_t key) {
    if (Limit* limit = Of(key)) ++limit->num_rows;
  }
  void CountRemoval(uint64_t key) {
    if (Limit* limit = Of(key)) --limit->num_rows;
  }
  void CountClear();
  // A row of this key is about to be inserted: see NextVictim().
  void Expect(uint64_t key) {
    if (Limit* limit = Of(key)) ++limit->num_expected;
  }
  void ExpectNothing();
  // The oldest row of a group whose rows, with those expected, are more than its share. Null: there
  // is none. The caller removes it at once.
  SignIndex::Entry* NextVictim(const SignIndex& index);
  // Whether a group has no room for all the rows that are expected, even without the ones it has.
  bool HasTooMany() const;
  // To be called where stamps have changed, or rows were inserted with stamps of the past.
  void ForgetVictims();
  uint64_t memory_bytes() const;

 private:
  struct Limit {
    uint64_t share;
    uint64_t num_rows = 0;
    uint64_t num_expected = 0;
    VictimQueue victims;
  };

  Limit* Of(uint64_t key) {
    if (limits_.empty()) return nullptr;
    const uint32_t group = policies_->GroupOfKey(key);
    if (group >= number_of_group_.size() || number_of_group_[group] == kNone) return nullptr;
    return &limits_[number_of_group_[group]];
  }

  static constexpr uint32_t kNone = UINT32_MAX;
  const RowPolicies* policies_ = nullptr;
  std::vector<uint32_t> number_of_group_;  // in limits_
  std::vector<Limit> limits_;
};

}  // namespace persia::store

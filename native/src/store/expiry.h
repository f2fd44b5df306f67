// Expiry: which rows of a shard no training batch has used for their time to live.
//
// An index entry has the number of the batch that used its row last, the stamp, and no time. Marks
// say when some of the batches were: a row that is older than a mark was not used since the mark's
// time. Marks are the sparser the longer ago they are, so that a row goes late by at most a 32nd of
// its idle time, and some hundreds of marks are enough for years.
//
// Each training batch passes over as many entries as it takes to have passed over all of them in a
// quarter of the shortest time to live, but never over more than kMaxPassed: no batch waits for a
// walk through the shard, and rows stay longer where there are not enough batches.
//
// Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/row_policy.h"
#include "store/sign_index.h"

namespace persia::store {

class Expiry {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr size_t kMaxPassed = 8192;
  static constexpr size_t kMaxExpired = 256;  // of one batch

  // Of any group, seconds; 0: nothing expires, and Step() is not called.
  void SetShortest(double time_to_live_sec);
  bool is_on() const { return shortest_ > 0; }

  // The training batch `stamp` begins `now`, which never falls. Returns the keys of rows to be
  // removed, valid until the next call.
  std::span<const uint64_t> Step(const SignIndex& index, const RowPolicies& policies,
                                 uint32_t stamp, Time now);
  // Stamps have changed: all rows count as used just now.
  void Forget() { marks_.clear(); }
  uint64_t memory_bytes() const {
    return marks_.capacity() * sizeof(Mark) + expired_.capacity() * sizeof(uint64_t);
  }

 private:
  // Batches below `stamp` began before `time`.
  struct Mark {
    uint32_t stamp;
    Time time;
  };

  void AddMark(uint32_t stamp, Time now);
  // Rows with smaller stamps were not used since `time`; some others may not have been either.
  uint32_t StampsBefore(Time time) const;
  size_t EntriesToPass(uint64_t num_entries, Time now);

  double shortest_ = 0;
  std::vector<Mark> marks_;  // the oldest first
  uint64_t next_key_ = 0;    // where the walk goes on
  double num_due_ = 0;       // entries, also fractions of one
  Time last_step_{};
  std::vector<uint64_t> expired_;
};

}  // namespace persia::store

// VictimQueue: the least recently used rows of a shard, oldest first.
//
// Touching a row only writes the number of the batch, its stamp, into the index entry that led to
// it. Order is made when it is needed: when a full shard wants victims, sequential passes over the
// index collect the oldest quarter of the rows, sorted; they are handed out one by one, and those
// touched since are skipped, for they are no longer old. Rows that were not collected are all newer
// than those that were, so the order is exact to the batch; a scan of n rows serves about n / 4
// evictions. Within one batch it is the order of the keys.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "store/sign_index.h"

namespace persia::store {

class VictimQueue {
 public:
  VictimQueue() = default;
  // Only of the rows that `is_candidate` is true for.
  explicit VictimQueue(std::function<bool(const SignIndex::Entry&)> is_candidate)
      : is_candidate_(std::move(is_candidate)) {}

  // The oldest row, which the caller removes at once. There must be a row.
  SignIndex::Entry* Pop(const SignIndex& index);
  // The same of the rows collected so far, which may stay; null: there are no more of them.
  SignIndex::Entry* PopCollected(const SignIndex& index);
  // For PopCollected(), where there is nothing left to pop, of a part of the index alone; keys
  // ascend.
  void CollectFrom(std::span<const SignIndex::Entry> candidates);
  bool is_empty() const { return victims_.empty(); }
  // Calls visit(entry) for the next rows that may be popped as things are, until it was true of
  // `count` of them; it looks no further than a few times as many.
  template <typename Visit>
  void Peek(const SignIndex& index, size_t count, Visit visit) const {
    const size_t most = std::min(8 * count, victims_.size());
    for (size_t i = 0; i < most && count > 0; ++i) {
      const Victim& victim = victims_[victims_.size() - 1 - i];
      const SignIndex::Entry* entry = index.Find(victim.key);
      if (entry != nullptr && entry->stamp == victim.stamp && visit(*entry)) --count;
    }
  }
  void Clear() { victims_ = {}; }
  // Gives back memory that is more than twice what the collected rows take. Constant time per row
  // popped since.
  void TrimMemory() {
    if (victims_.capacity() > 2 * victims_.size()) victims_.shrink_to_fit();
  }
  // To collect.
  uint64_t num_passes() const { return num_passes_; }
  uint64_t memory_bytes() const { return victims_.capacity() * sizeof(Victim); }

 private:
  struct Victim {
    uint64_t key;
    uint32_t stamp;
  };

  void Collect(const SignIndex& index);
  // for_each(visit) calls visit(entry) for each candidate.
  template <typename ForEach>
  void CollectOf(ForEach for_each);
  bool IsCandidate(const SignIndex::Entry& entry) const {
    return !is_candidate_ || is_candidate_(entry);
  }

  std::function<bool(const SignIndex::Entry&)> is_candidate_;  // none: all are
  std::vector<Victim> victims_;                                // newest first: taken from the back
  uint64_t num_passes_ = 0;
};

// Stamps are 32 bits; after four thousand million batches they begin anew: each falls by 2^31, and
// rows that were not touched during the last 2^31 batches all become equally old.
void RebaseStamps(const SignIndex& index);
inline constexpr uint32_t kLastStamp = UINT32_MAX;
inline constexpr uint32_t kStampRebase = 1u << 31;

}  // namespace persia::store

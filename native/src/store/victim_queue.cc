#include "store/victim_queue.h"

#include <algorithm>
#include <array>

namespace persia::store {
namespace {

// Enough to hit a quarter of the rows closely; their counts stay in the first-level cache.
constexpr uint32_t kBuckets = 4096;
constexpr uint64_t kShare = 4;  // one row in four is collected

// Stamps from the oldest to the newest, divided into equal buckets.
struct Buckets {
  uint32_t oldest = UINT32_MAX;
  uint32_t newest = 0;
  uint64_t num_rows = 0;
  std::array<uint32_t, kBuckets> counts{};

  uint32_t Of(uint32_t stamp) const {
    const uint64_t range = uint64_t{newest} - oldest + 1;
    return static_cast<uint32_t>((uint64_t{stamp} - oldest) * kBuckets / range);
  }
};

// Two passes, which are cheaper than sorting: the first finds the range.
template <typename ForEach>
Buckets CountStamps(ForEach for_each) {
  Buckets buckets;
  for_each([&](const SignIndex::Entry& entry) {
    ++buckets.num_rows;
    buckets.oldest = std::min(buckets.oldest, entry.stamp);
    buckets.newest = std::max(buckets.newest, entry.stamp);
  });
  for_each([&](const SignIndex::Entry& entry) { ++buckets.counts[buckets.Of(entry.stamp)]; });
  return buckets;
}

}  // namespace

SignIndex::Entry* VictimQueue::Pop(const SignIndex& index) {
  while (true) {
    // Ends: there is a row, so a collection has at least one with its present stamp.
    if (victims_.empty()) Collect(index);
    if (SignIndex::Entry* entry = PopCollected(index); entry != nullptr) return entry;
  }
}

SignIndex::Entry* VictimQueue::PopCollected(const SignIndex& index) {
  // A victim is looked up, and usually removed, by its key: a miss each, overlapped.
  constexpr size_t kAhead = 16;
  while (!victims_.empty()) {
    const Victim victim = victims_.back();
    victims_.pop_back();
    if (victims_.size() >= kAhead)
      __builtin_prefetch(index.HomeOf(victims_[victims_.size() - kAhead].key), 1);
    // One that was touched, removed or made anew since has another stamp.
    SignIndex::Entry* entry = index.Find(victim.key);
    if (entry != nullptr && entry->stamp == victim.stamp) return entry;
  }
  return nullptr;
}

void VictimQueue::Collect(const SignIndex& index) {
  index.RefreshAll();  // once for all passes
  CollectOf([&](const auto& visit) {
    index.ForEachAsIs([&](const SignIndex::Entry& entry) {
      if (IsCandidate(entry)) visit(entry);
    });
  });
}

// A part of an index: the resident rows of a tier's shard.
void VictimQueue::CollectFrom(std::span<const SignIndex::Entry> candidates) {
  CollectOf([&](const auto& visit) { std::for_each(candidates.begin(), candidates.end(), visit); });
}

template <typename ForEach>
void VictimQueue::CollectOf(ForEach for_each) {
  ++num_passes_;
  // Whole buckets, so that rows which are not collected are all newer than those that are.
  const Buckets buckets = CountStamps(for_each);
  uint32_t last = 0;
  uint64_t wanted = buckets.counts[0];
  while (wanted * kShare < buckets.num_rows) wanted += buckets.counts[++last];
  victims_.reserve(wanted);
  for_each([&](const SignIndex::Entry& entry) {
    if (buckets.Of(entry.stamp) <= last) victims_.push_back({entry.key, entry.stamp});
  });
  // Keys ascend already; a stable order makes the result a function of the history alone.
  std::stable_sort(victims_.begin(), victims_.end(),
                   [](const Victim& a, const Victim& b) { return a.stamp > b.stamp; });
}

// What is older than the base becomes 0: the oldest there is.
void RebaseStamps(const SignIndex& index) {
  index.ChangeStamps(
      [](uint32_t stamp) { return stamp < kStampRebase ? 0 : stamp - kStampRebase; });
}

}  // namespace persia::store

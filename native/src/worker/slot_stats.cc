#include "worker/slot_stats.h"

#include "base/duration_stats.h"

namespace persia::worker {
namespace {

constexpr uint64_t kAllBatches = 64;
constexpr uint64_t kOneBatchIn = 32;

}  // namespace

SlotCounters::SlotCounters(const SlotTable& slots)
    : slots_(slots.slots()), counters_(slots.slots().size()) {}

void SlotCounters::LookedUp(const SlotConfig& slot, uint64_t num_ids,
                            std::span<const uint64_t> new_signs) {
  if (num_ids == 0 || !DurationStats::enabled()) return;
  constexpr auto kRelaxed = std::memory_order_relaxed;
  Counters& counters = Of(slot);
  counters.num_ids.fetch_add(num_ids, kRelaxed);
  counters.num_distinct.fetch_add(new_signs.size(), kRelaxed);
  counters.last_distinct_ratio.store(
      static_cast<double>(new_signs.size()) / static_cast<double>(num_ids), kRelaxed);
  const uint64_t batch = counters.num_batches.fetch_add(1, kRelaxed);
  if (batch < kAllBatches || batch % kOneBatchIn == 0) counters.distinct.Add(new_signs);
}

std::vector<SlotStats> SlotCounters::stats() const {
  std::vector<SlotStats> all;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Counters& counters = counters_[i];
    all.push_back({.slot = slots_[i].name,
                   .num_ids = counters.num_ids.load(),
                   .num_distinct = counters.num_distinct.load(),
                   .last_distinct_ratio = counters.last_distinct_ratio.load(),
                   .estimated_distinct = counters.distinct.Estimate(),
                   .num_nonfinite = counters.num_nonfinite.load(),
                   .num_skipped = counters.num_skipped.load()});
  }
  return all;
}

}  // namespace persia::worker

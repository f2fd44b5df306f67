#include "worker/slot_stats.h"

#include "base/duration_stats.h"

namespace persia::worker {
namespace {

// How many batches the estimate takes: see LookedUp().
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
  counters.num_ids.Add(num_ids);
  counters.num_distinct.Add(new_signs.size());
  counters.last_distinct_ratio.store(
      static_cast<double>(new_signs.size()) / static_cast<double>(num_ids), kRelaxed);
  const uint64_t batch = counters.num_batches.fetch_add(1, kRelaxed);
  if (batch < kAllBatches || batch % kOneBatchIn == 0) counters.distinct.Add(new_signs);
}

std::vector<SlotStats> SlotCounters::stats() const {
  std::vector<SlotStats> all;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Counters& counters = counters_[i];
    Metrics& metrics = all.emplace_back(SlotStats{slots_[i].name, {}}).metrics;
    counters.list.AddTo(&metrics);
    metrics.AddRatio("last_distinct_ratio", "batch_unique_indices_rate",
                     "Distinct indices of the latest batch by all.",
                     counters.last_distinct_ratio.load());
    metrics.AddRatio("estimated_distinct", "estimated_distinct_id",
                     "Different indices so far, estimated.", counters.distinct.Estimate());
  }
  return all;
}

}  // namespace persia::worker

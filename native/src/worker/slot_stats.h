// SlotStats: what a worker counts about each of its slots, since it started. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/cardinality.h"
#include "worker/slot_table.h"

namespace persia::worker {

struct SlotStats {
  std::string slot;
  uint64_t num_ids = 0;            // looked up, repetitions counted
  uint64_t num_distinct = 0;       // the sum of the batches' distinct signs
  double last_distinct_ratio = 0;  // distinct signs of the latest batch by its IDs
  double estimated_distinct = 0;   // different signs of the batches sampled, within about 2 %
  uint64_t num_nonfinite = 0;      // gradients not applied: NaN or infinite
  uint64_t num_skipped = 0;        // the loss did not reach the slot
};

class SlotCounters {
 public:
  explicit SlotCounters(const SlotTable& slots);  // which must outlive this

  // A batch's IDs of `slot`, and those of its signs that no earlier slot of its feature group
  // brought along in the same batch. Of a slot's first 64 batches all, and then one in 32 count
  // in the estimate of different signs: IDs that come back are seen soon, and it costs a hash a
  // sign.
  void LookedUp(const SlotConfig& slot, uint64_t num_ids, std::span<const uint64_t> new_signs);
  void Nonfinite(const SlotConfig& slot) { Of(slot).num_nonfinite.fetch_add(1); }
  void Skipped(const SlotConfig& slot) { Of(slot).num_skipped.fetch_add(1); }

  std::vector<SlotStats> stats() const;

 private:
  struct Counters {
    std::atomic<uint64_t> num_ids{0};
    std::atomic<uint64_t> num_batches{0};
    std::atomic<uint64_t> num_distinct{0};
    std::atomic<double> last_distinct_ratio{0};
    std::atomic<uint64_t> num_nonfinite{0};
    std::atomic<uint64_t> num_skipped{0};
    Cardinality distinct;
  };

  Counters& Of(const SlotConfig& slot) { return counters_[&slot - slots_.data()]; }

  const std::span<const SlotConfig> slots_;
  std::deque<Counters> counters_;  // of each slot; never moved
};

}  // namespace persia::worker

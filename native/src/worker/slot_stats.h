// SlotCounters: what a worker counts about each of its slots, since it started.
//
// Thread-safe, and cheap enough for every batch: a few additions a slot, and a hash a sign of the
// batches that are sampled.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/cardinality.h"
#include "base/metrics.h"
#include "worker/slot_table.h"

namespace persia::worker {

struct SlotStats {
  static constexpr const char* kLabel = "slot";
  std::string name;
  Metrics metrics;
};

class SlotCounters {
 public:
  explicit SlotCounters(const SlotTable& slots);  // which must outlive this

  // A batch's IDs of `slot`, and those of its signs that no earlier slot of its feature group
  // brought along in the same batch. Of a slot's first 64 batches all, and then one in 32 count
  // in the estimate of different signs: IDs that come back are seen soon, and it costs a hash a
  // sign.
  void LookedUp(const SlotConfig& slot, uint64_t num_ids, std::span<const uint64_t> new_signs);
  void Nonfinite(const SlotConfig& slot) { Of(slot).num_nonfinite.Add(); }
  void Skipped(const SlotConfig& slot) { Of(slot).num_skipped.Add(); }

  std::vector<SlotStats> stats() const;

 private:
  // Of one slot. Names without "persia_" are those of the published system.
  struct Counters {
    CounterList list;
    Counter num_ids{list, {"num_ids", nullptr}};            // looked up, repetitions counted
    Counter num_distinct{list, {"num_distinct", nullptr}};  // the batches' distinct signs, summed
    Counter num_nonfinite{list,
                          {"num_nonfinite", "nan_count", "Gradients dropped: NaN or infinite."}};
    Counter num_skipped{list,
                        {"num_skipped", "nan_grad_skipped", "Gradients the loss gave none for."}};
    std::atomic<uint64_t> num_batches{0};
    std::atomic<double> last_distinct_ratio{0};
    Cardinality distinct;  // within about 2 %
  };

  Counters& Of(const SlotConfig& slot) { return counters_[&slot - slots_.data()]; }

  const std::span<const SlotConfig> slots_;
  std::deque<Counters> counters_;  // of each slot; never moved
};

}  // namespace persia::worker

// SlotTable: the slots of an embedding config, checked, and the rule that makes signs of their IDs.
//
// An ID becomes `num_buckets` signs: the hash stack maps it to one bucket in each of `rounds`
// disjoint ranges, and the group's prefix replaces the top bits. Immutable after Create(), so any
// number of threads may read it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/metrics.h"
#include "base/status.h"
#include "worker/slot_config.h"

namespace persia::worker {

inline constexpr uint32_t kMaxDim = 65536;  // the store's limit, refused here while it can be named

// A slot's address is its identity: batches and counters point into the table, which must outlive
// them and is never moved once they do.
class SlotTable {
 public:
  // kInvalidArgument names the slot and what is wrong with it: see EmbeddingWorker::Create.
  // Sets the prefixes that the config leaves to it. `feature_index_prefix_bit` is 1 to 32, so an ID
  // keeps at least 32 bits.
  static StatusOr<SlotTable> Create(uint32_t feature_index_prefix_bit,
                                    std::vector<SlotConfig> slots);

  // Null: there is no such slot.
  // A search by name: once a feature and batch, not once an ID.
  const SlotConfig* Find(std::string_view name) const;
  // All of them; Find() points into these.
  std::span<const SlotConfig> slots() const { return slots_; }

  // The job's config, with that of each feature group whose slots have one of their own.
  // Servers find the policy of a row by the top bits of its sign, so they are told of groups, not
  // of slots.
  TrainConfig WithGroups(const TrainConfig& config) const;

  // signs[i * num_buckets()..] become those of ids[i], in the order of the rounds.
  void MakeSigns(const SlotConfig& slot, std::span<const uint64_t> ids, uint64_t* signs) const;

 private:
  SlotTable(uint32_t id_bits, std::vector<SlotConfig> slots);

  uint32_t id_bits_ = 0;
  std::vector<SlotConfig> slots_;
  // Positions rather than pointers, so that the table may be moved before it is used.
  std::map<std::string, size_t, std::less<>> index_;
};

// id % (2^id_bits - 1), for id_bits of at least 32, without a division.
// Public for its test. IDs that differ by a multiple of the modulus share a sign, as in the
// published system.
uint64_t FoldId(uint64_t id, uint32_t id_bits);

// The numbers of one slot, as they are when they are asked for.
struct SlotStats {
  static constexpr const char* kLabel = "slot";
  std::string name;
  Metrics metrics;
};

// What a worker counts about each of its slots, since it started. Thread-safe, and cheap enough for
// every batch: a few additions a slot, and a hash a sign of the batches that are sampled.
// Owned by the EmbeddingWorker, whose metrics read it.
class SlotCounters {
 public:
  explicit SlotCounters(const SlotTable& slots);  // which must outlive this

  // A batch's IDs of `slot`, and those of its signs that no earlier slot of its feature group
  // brought along in the same batch. Of a slot's first 64 batches all, and then one in 32 count
  // in the estimate of different signs: IDs that come back are seen soon, and it costs a hash a
  // sign.
  void LookedUp(const SlotConfig& slot, uint64_t num_ids, std::span<const uint64_t> new_signs);
  // A batch in which the slot's gradient was left out because it was not finite.
  void Nonfinite(const SlotConfig& slot) { Of(slot).num_nonfinite.Add(); }
  // A batch that returned no gradient for the slot.
  void Skipped(const SlotConfig& slot) { Of(slot).num_skipped.Add(); }
  // A lookup that sent the slot's distinct rows instead of its pooled embeddings.
  void SentAsRows(const SlotConfig& slot) { Of(slot).num_as_rows.Add(); }

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
    Counter num_as_rows{list, {"num_as_rows", nullptr}};  // lookups
    std::atomic<uint64_t> num_batches{0};
    std::atomic<double> last_distinct_ratio{0};
    Cardinality distinct;  // within about 2 %
  };

  Counters& Of(const SlotConfig& slot) { return counters_[&slot - slots_.data()]; }

  const std::span<const SlotConfig> slots_;
  std::deque<Counters> counters_;  // of each slot; never moved
};

}  // namespace persia::worker

// SlotTable: the slots of an embedding config, checked, and the rule that makes signs of their IDs.
//
// An ID becomes `num_buckets` signs: the hash stack maps it to one bucket in each of `rounds`
// disjoint ranges, and the group's prefix replaces the top bits. Immutable after Create(), so any
// number of threads may read it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "worker/slot_config.h"

namespace persia::worker {

inline constexpr uint32_t kMaxDim = 65536;  // the store's limit, refused here while it can be named

class SlotTable {
 public:
  // kInvalidArgument names the slot and what is wrong with it: see EmbeddingWorker::Create.
  static StatusOr<SlotTable> Create(uint32_t feature_index_prefix_bit,
                                    std::vector<SlotConfig> slots);

  // Null: there is no such slot.
  const SlotConfig* Find(std::string_view name) const;
  // All of them; Find() points into these.
  std::span<const SlotConfig> slots() const { return slots_; }

  // The job's config, with that of each feature group whose slots have one of their own.
  TrainConfig WithGroups(const TrainConfig& config) const;

  // signs[i * num_buckets()..] become those of ids[i], in the order of the rounds.
  void MakeSigns(const SlotConfig& slot, std::span<const uint64_t> ids, uint64_t* signs) const;

 private:
  SlotTable(uint32_t id_bits, std::vector<SlotConfig> slots);

  uint32_t id_bits_ = 0;
  std::vector<SlotConfig> slots_;
  std::map<std::string, size_t, std::less<>> index_;
};

// id % (2^id_bits - 1), for id_bits of at least 32, without a division.
uint64_t FoldId(uint64_t id, uint32_t id_bits);

}  // namespace persia::worker

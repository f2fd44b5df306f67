// SlotConfig: how an embedding worker treats the IDs of one feature.
#pragma once

#include <cstdint>
#include <string>

#include "base/train_config.h"

namespace persia::worker {

// What the sum of a sample's rows is divided by.
enum class Scaling : uint8_t {
  kNone,
  kSqrt,  // the square root of the number of rows; of the sum of their squared weights
  kMean,  // the number of IDs; the sum of their weights
};

// Which lookup stages of a batch a call is about: bit s stands for the slots whose `stage` is s.
using StageMask = uint32_t;
inline constexpr StageMask kAllStages = 0;
inline constexpr uint32_t kMaxStages = 32;

struct SlotConfig {
  std::string name;
  uint32_t dim = 0;
  bool embedding_summation = true;  // false: a raw slot
  bool sqrt_scaling = false;
  bool mean_scaling = false;        // of pooled slots; not with sqrt_scaling
  uint32_t sample_fixed_size = 10;  // raw slots: IDs a sample keeps
  uint32_t hash_stack_rounds = 0;   // 0: no hash stack
  uint64_t hash_stack_size = 0;     // embedding_size of each round
  // Slots of one stage share a consistency mode and are looked up together, those of other stages
  // possibly at another time. Below kMaxStages; equal within a feature group.
  uint32_t stage = 0;
  // What is added to the slot's IDs: the group's number in the top bits. 0: SlotTable makes it from
  // `group`, as (group + 1) << (64 - feature_index_prefix_bit).
  uint64_t index_prefix = 0;
  // Position of the feature group, from 0; slots of one group share rows and dim.
  uint32_t group = 0;
  // What differs from the job's train config; equal within a feature group.
  SlotRowConfig rows = {};

  Scaling scaling() const {
    if (mean_scaling) return Scaling::kMean;
    return sqrt_scaling ? Scaling::kSqrt : Scaling::kNone;
  }
  // Signs that one ID stands for.
  uint32_t num_buckets() const { return hash_stack_rounds == 0 ? 1 : hash_stack_rounds; }
};

inline bool Includes(StageMask stages, uint32_t stage) {
  return stages == kAllStages || (stages >> stage & 1) != 0;
}

}  // namespace persia::worker

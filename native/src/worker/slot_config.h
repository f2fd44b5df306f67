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

// Which slots of a batch a call is about: bit m stands for the slots whose `mode` is m. What the
// modes mean, and which are looked up together, only the pipeline of the rank knows.
using SlotMask = uint32_t;
inline constexpr SlotMask kAllSlots = 0;
inline constexpr uint32_t kMaxSlotModes = 32;

// One slot of the embedding config. SlotTable checks it together with the others: what slots of one
// feature group must have in common is said there.
// A plain value; what is in it has been checked only once it is in a SlotTable.
struct SlotConfig {
  std::string name;
  uint32_t dim = 0;
  // Pooled slots give one row a sample; raw ones give each distinct ID's row and an index.
  bool embedding_summation = true;  // false: a raw slot
  bool sqrt_scaling = false;
  bool mean_scaling = false;        // of pooled slots; not with sqrt_scaling
  uint32_t sample_fixed_size = 10;  // raw slots: IDs a sample keeps
  uint32_t hash_stack_rounds = 0;   // 0: no hash stack
  // Buckets in each round (`embedding_size` of the hash stack). An ID's embedding is the sum over
  // its buckets, one a round.
  uint64_t hash_stack_size = 0;
  // The number of the slot's consistency mode. A lookup names slots by it, so slots of different
  // modes may be looked up at different times. Below kMaxSlotModes; equal within a feature group.
  uint32_t mode = 0;
  // What is added to the slot's IDs: the group's number in the top bits. 0: SlotTable makes it from
  // `group`, as (group + 1) << (64 - feature_index_prefix_bit).
  uint64_t index_prefix = 0;
  // Position of the feature group, from 0; slots of one group share rows and dim.
  uint32_t group = 0;
  // Above 0: client/EmbeddingBags keeps the rows by ID (store/row_arrays.h), and refuses IDs that
  // are not below it. Equal within a feature group. Workers ignore it: a parameter server has the
  // rows of some IDs, chosen by a hash.
  uint64_t num_array_ids = 0;
  // What differs from the job's train config; equal within a feature group.
  SlotRowConfig rows = {};

  // Of pooled slots; SlotTable has refused both flags at once.
  Scaling scaling() const {
    if (mean_scaling) return Scaling::kMean;
    return sqrt_scaling ? Scaling::kSqrt : Scaling::kNone;
  }
  // Signs that one ID stands for.
  uint32_t num_buckets() const { return hash_stack_rounds == 0 ? 1 : hash_stack_rounds; }
};

// Whether a call about `slots` is about those of this mode.
inline bool Includes(SlotMask slots, uint32_t mode) {
  return slots == kAllSlots || (slots >> mode & 1) != 0;
}

}  // namespace persia::worker

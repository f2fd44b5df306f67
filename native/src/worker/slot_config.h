// SlotConfig: how an embedding worker treats the IDs of one feature.
#pragma once

#include <cstdint>
#include <string>

namespace persia::worker {

struct SlotConfig {
  std::string name;
  uint32_t dim = 0;
  bool embedding_summation = true;  // false: a raw slot
  bool sqrt_scaling = false;
  uint32_t sample_fixed_size = 10;  // raw slots: IDs a sample keeps
  uint32_t hash_stack_rounds = 0;   // 0: no hash stack
  uint64_t hash_stack_size = 0;     // embedding_size of each round
  // What is added to the slot's IDs: the group's number in the top bits. 0: SlotTable makes it from
  // `group`, as (group + 1) << (64 - feature_index_prefix_bit).
  uint64_t index_prefix = 0;
  // Position of the feature group, from 0; slots of one group share rows and dim.
  uint32_t group = 0;

  // Signs that one ID stands for.
  uint32_t num_buckets() const { return hash_stack_rounds == 0 ? 1 : hash_stack_rounds; }
};

}  // namespace persia::worker

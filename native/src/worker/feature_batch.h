// FeatureBatch: the ID features of one batch, decoded in place over bytes that it owns.
//
// The bytes come from a loader and are not trusted: base/id_features.h checks their form, and
// Decode() what concerns the slots, so that whoever holds a FeatureBatch need not check again.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "worker/slot_table.h"

namespace persia::worker {

// Views of the batch's bytes.
struct Feature {
  const SlotConfig* slot = nullptr;
  // [batch_size + 1]; sample s has ids[offsets[s] .. offsets[s + 1]).
  std::span<const uint32_t> offsets;
  std::span<const uint64_t> ids;
  std::span<const float> weights = {};  // one an ID; empty: all 1
};

class FeatureBatch {
 public:
  // `slots` must outlive the batch. Fails as DecodeIdFeatures does, and with kInvalidArgument on an
  // unknown feature, on weights for a raw slot or on more IDs than a batch can have.
  static StatusOr<FeatureBatch> Decode(Buffer bytes, const SlotTable& slots);

  uint32_t batch_size() const { return batch_size_; }
  std::span<const Feature> features() const { return features_; }
  size_t size_bytes() const { return bytes_.size(); }

 private:
  Buffer bytes_;
  uint32_t batch_size_ = 0;
  std::vector<Feature> features_;
};

}  // namespace persia::worker

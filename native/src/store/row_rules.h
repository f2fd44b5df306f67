// RowRules: what the train config means for one row: its shape, admission, first values and update.
//
// Immutable, hence thread-safe; a change of configuration makes new rules.
#pragma once

#include <cstdint>
#include <vector>

#include "base/train_config.h"
#include "simd/kernels.h"
#include "store/row_slabs.h"

namespace persia::store {

class RowRules {
 public:
  explicit RowRules(const TrainConfig& config);

  RowShape ShapeFor(uint32_t dim) const;
  // Decided by (seed, sign), so every server and every run decides alike.
  bool Admits(uint64_t sign) const;
  // A new row: values by (seed, sign), state of an optimizer that has not stepped.
  void Initialize(uint64_t sign, const RowView& row) const;
  // The state alone, for a row whose values are given.
  void InitializeState(const RowView& row) const;
  // One optimizer step, then the weight bound.
  void ApplyGradient(const RowView& row, const float* gradient) const;

 private:
  struct AdamCorrection {
    float step_size, second_scale;
  };

  uint64_t StreamOf(uint64_t sign) const;
  AdamCorrection ComputeCorrection(uint32_t step) const;
  void ApplyRowwiseAdagrad(const RowView& row, const float* gradient) const;
  void ApplyAdam(const RowView& row, const float* gradient) const;

  const TrainConfig config_;
  const simd::Kernels& kernels_;
  simd::SgdRule sgd_;
  simd::AdagradRule adagrad_;
  simd::AdamRule adam_;
  // Of step i + 1; two powers a row would cost more than the row.
  std::vector<AdamCorrection> corrections_;
};

}  // namespace persia::store

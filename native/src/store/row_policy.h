// RowPolicy: what a row config means for one row: its shape, admission, first values and update.
//
// Immutable, hence thread-safe; a change of configuration makes new rules.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/train_config.h"
#include "simd/kernels.h"
#include "store/bias_corrections.h"
#include "store/row_slabs.h"

namespace persia::store {

class RowPolicy {
 public:
  explicit RowPolicy(const RowConfig& config, RowDtype dtype = RowDtype::kFloat32);

  RowShape ShapeFor(uint32_t dim) const;
  // Decided by (seed, sign), so every server and every run decides alike.
  bool Admits(uint64_t sign) const;
  // Training batches that must have an admitted sign before it gets a row.
  uint32_t admit_after() const { return config_.admit_after; }
  // Seconds; 0: for ever.
  double time_to_live_sec() const { return config_.time_to_live_sec; }
  uint64_t capacity() const { return config_.capacity; }
  float min_norm() const { return config_.min_norm; }
  // A new row: values by (seed, sign), state of an optimizer that has not stepped.
  void Initialize(uint64_t sign, const RowView& row) const;
  // The state alone, for a row whose values are given.
  void InitializeState(const RowView& row) const;
  // One optimizer step for each of some rows of one dim, then the weight bound. A row whose
  // gradient is not finite is left as it is; returns how many were. The rest of `rows` is filled
  // here: w, state, g and scalar are given, w where the embedding lies.
  size_t ApplyGradients(std::span<simd::RowStep> rows, uint32_t dim) const;

 private:
  uint64_t StreamOf(uint64_t sign) const;
  void DrawValues(uint64_t sign, uint32_t dim, float* values) const;
  size_t Step(std::span<const simd::RowStep> rows, uint32_t dim) const;
  // The same where the embeddings of `rows` are of 16 bits: through float32 and back.
  size_t StepNarrow(std::span<const simd::RowStep> rows, uint32_t dim) const;
  // Counts the rows' steps and fills in what Adam's kin need of them.
  void CountSteps(std::span<simd::RowStep> rows, uint32_t dim) const;

  const RowConfig config_;
  const RowFormat format_;
  const float weight_bound_;  // 0: none
  const simd::Kernels& kernels_;
  const simd::NormalRule normal_;  // of initial values, unscaled
  const simd::UpdateRows update_;
  std::shared_ptr<const BiasCorrections> corrections_;  // Adam and its kin, else null
  std::vector<float> step_sizes_;                       // of the corrections' table
};

}  // namespace persia::store

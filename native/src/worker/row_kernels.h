// What pooling and reduction do to rows, element by element, in this order and in float32.
//
// Long rows go through the simd layer. A short one costs less than the call through a pointer that
// leads there, so it is done in place; the bits are the same, for neither way fuses or reorders.
#pragma once

#include <cstddef>

#include "simd/kernels.h"

namespace persia::worker {

// Stateless and thread-safe.
class RowKernels {
 public:
  RowKernels() : kernels_(simd::ActiveKernels()) {}

  // sum += row
  void Add(const float* row, size_t dim, float* sum) const {
    if (dim >= kMinCallDim) return kernels_.add(sum, row, dim);
    for (size_t i = 0; i < dim; ++i) sum[i] += row[i];
  }
  // sum += factor * row
  void AddScaled(const float* row, float factor, size_t dim, float* sum) const {
    if (dim >= kMinCallDim) return kernels_.add_scaled(sum, row, factor, dim);
    for (size_t i = 0; i < dim; ++i) sum[i] += factor * row[i];
  }
  // row *= factor
  void Scale(float factor, size_t dim, float* row) const {
    if (dim >= kMinCallDim) return kernels_.scale(row, factor, dim);
    for (size_t i = 0; i < dim; ++i) row[i] *= factor;
  }

 private:
  static constexpr size_t kMinCallDim = 16;  // from here on the call is faster

  const simd::Kernels& kernels_;
};

}  // namespace persia::worker

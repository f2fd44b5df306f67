// RowFormat: the format of embeddings in memory: float32, or 16 bits an element (ADR 20).
//
// No other file knows it. All arithmetic, all values that callers get and all files are float32;
// the optimizer's state is float32 in every format. Stateless, hence thread-safe.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/status.h"
#include "simd/kernels.h"

namespace persia::store {

enum class RowDtype : uint8_t { kFloat32, kFloat16, kBfloat16 };

// "float32", "float16" or "bfloat16"; else kInvalidArgument.
StatusOr<RowDtype> RowDtypeOf(std::string_view name);

// Floats of memory for an embedding: what follows it stays aligned.
constexpr uint32_t EmbeddingFloats(RowDtype dtype, uint32_t dim) {
  return dtype == RowDtype::kFloat32 ? dim : (dim + 1) / 2;
}

class RowFormat {
 public:
  explicit RowFormat(RowDtype dtype);

  RowDtype dtype() const { return dtype_; }
  uint32_t EmbeddingFloats(uint32_t dim) const { return store::EmbeddingFloats(dtype_, dim); }
  // Null for float32, whose rows are used where they lie.
  const simd::NarrowRows* narrow() const { return narrow_; }

  // Reads rows where they lie.
  const simd::Pooling& pooling() const {
    return narrow_ == nullptr ? simd::ActiveKernels().pooling : narrow_->pooling;
  }

  // `row` is the embedding's memory; `out` gets `dim` floats.
  void Read(float* out, const float* row, uint32_t dim) const {
    if (narrow_ == nullptr) [[likely]] {
      std::memcpy(out, row, dim * sizeof(float));
    } else {
      narrow_->read(out, reinterpret_cast<const uint16_t*>(row), dim);
    }
  }
  // Rounds to nearest: for values that are given. Updates round stochastically, so that steps
  // smaller than a format's resolution are not lost (RowPolicy).
  void Write(float* row, const float* values, uint32_t dim) const {
    if (narrow_ == nullptr) [[likely]] {
      std::memcpy(row, values, dim * sizeof(float));
    } else {
      narrow_->write(reinterpret_cast<uint16_t*>(row), values, dim);
    }
  }
  // Of a bound on weights, where 0 is none: the greatest number not above it that rows can have, so
  // that what is clamped to it stays within it when it is rounded.
  float Bound(float bound) const;

 private:
  RowDtype dtype_;
  const simd::NarrowRows* narrow_;
};

}  // namespace persia::store

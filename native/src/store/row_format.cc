#include "store/row_format.h"

#include <algorithm>
#include <string>

namespace persia::store {
namespace {

const simd::NarrowRows* NarrowRowsOf(RowDtype dtype) {
  switch (dtype) {
    case RowDtype::kFloat32: return nullptr;
    case RowDtype::kFloat16: return &simd::ActiveKernels().float16_rows;
    case RowDtype::kBfloat16: return &simd::ActiveKernels().bfloat16_rows;
  }
  return nullptr;
}

}  // namespace

StatusOr<RowDtype> RowDtypeOf(std::string_view name) {
  if (name == "float32") return RowDtype::kFloat32;
  if (name == "float16") return RowDtype::kFloat16;
  if (name == "bfloat16") return RowDtype::kBfloat16;
  return InvalidArgument("row_dtype is '", name, "'; choose float32, float16 or bfloat16");
}

RowFormat::RowFormat(RowDtype dtype) : dtype_(dtype), narrow_(NarrowRowsOf(dtype)) {}

// Rounds towards zero, by way of rounding to nearest: the number below in magnitude has the next
// lower bits.
float RowFormat::Bound(float bound) const {
  if (narrow_ == nullptr || bound == 0.0f) return bound;
  uint16_t nearest = 0;
  narrow_->write(&nearest, &bound, 1);
  float value;
  narrow_->read(&value, &nearest, 1);
  if (value <= bound && nearest != 0) return value;
  // Below the least number above 0 there is only 0, which would be no bound.
  nearest = std::max<uint16_t>(nearest, 2) - 1;
  narrow_->read(&value, &nearest, 1);
  return value;
}

}  // namespace persia::store

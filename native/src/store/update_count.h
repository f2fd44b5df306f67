// How many updates a row has had, in stores that count them: a cell behind the row's state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "store/row_slabs.h"

namespace persia::store {

inline constexpr uint32_t kUpdateCountFloats = 1;
static_assert(sizeof(uint32_t) == kUpdateCountFloats * sizeof(float));

// `values` are a row's, of a shape with such a tail or that shape without it.
inline uint32_t UpdateCountOf(const float* values, const RowShape& shape) {
  uint32_t count;
  std::memcpy(&count, values + size_t{shape.embedding_floats()} + shape.state_floats,
              sizeof(count));
  return count;
}
inline void SetUpdateCount(float* values, const RowShape& shape, uint32_t count) {
  std::memcpy(values + size_t{shape.embedding_floats()} + shape.state_floats, &count,
              sizeof(count));
}
// One more; the greatest count stays.
inline void CountUpdate(float* values, const RowShape& shape) {
  const uint32_t count = UpdateCountOf(values, shape);
  if (count != UINT32_MAX) SetUpdateCount(values, shape, count + 1);
}

}  // namespace persia::store

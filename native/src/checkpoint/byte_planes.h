// Byte planes: the first bytes of all numbers, then the second bytes, and so on.
//
// Floats of a model differ in their low bytes at random and hardly in their high ones: side by side
// the latter compress to a part of their size.
#pragma once

#include <cstddef>

namespace persia::checkpoint {

// `planes` has 4 * count bytes.
void SplitIntoPlanes(const float* values, size_t count, std::byte* planes);
void JoinPlanes(const std::byte* planes, size_t count, float* values);

}  // namespace persia::checkpoint

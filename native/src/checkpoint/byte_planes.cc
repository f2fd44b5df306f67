#include "checkpoint/byte_planes.h"

#include <cstdint>
#include <cstring>

namespace persia::checkpoint {

void SplitIntoPlanes(const float* values, size_t count, std::byte* planes) {
  auto* p = reinterpret_cast<uint8_t*>(planes);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, values + i, sizeof(bits));
    p[i] = static_cast<uint8_t>(bits);
    p[count + i] = static_cast<uint8_t>(bits >> 8);
    p[2 * count + i] = static_cast<uint8_t>(bits >> 16);
    p[3 * count + i] = static_cast<uint8_t>(bits >> 24);
  }
}

void JoinPlanes(const std::byte* planes, size_t count, float* values) {
  const auto* p = reinterpret_cast<const uint8_t*>(planes);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = p[i] | uint32_t{p[count + i]} << 8 | uint32_t{p[2 * count + i]} << 16 |
                          uint32_t{p[3 * count + i]} << 24;
    std::memcpy(values + i, &bits, sizeof(bits));
  }
}

}  // namespace persia::checkpoint

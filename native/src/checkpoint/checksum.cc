#include "checkpoint/checksum.h"

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace persia::checkpoint {

uint64_t Checksum(std::span<const std::byte> section, size_t checksum_offset) {
  const auto behind = section.subspan(checksum_offset + sizeof(uint64_t));
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, section.data(), checksum_offset);
  XXH3_64bits_update(&state, behind.data(), behind.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace persia::checkpoint

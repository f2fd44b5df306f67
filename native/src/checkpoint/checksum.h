// Checksums of sections that hold their own checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace persia::checkpoint {

// XXH3 (64 bits) of all but the eight bytes at `checksum_offset`.
uint64_t Checksum(std::span<const std::byte> section, size_t checksum_offset);

}  // namespace persia::checkpoint

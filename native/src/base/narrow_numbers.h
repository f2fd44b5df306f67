// Numbers in the fewest whole bytes that hold the greatest of them, little-endian: row numbers of
// embeddings and IDs of batches (docs/wire_format.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "base/bytes.h"

namespace persia {

// The fewest bytes, at least 1, that hold `greatest`.
inline uint8_t BytesFor(uint64_t greatest) {
  uint8_t bytes = 1;
  while (bytes < 8 && greatest >> (8 * bytes) != 0) ++bytes;
  return bytes;
}

// Calls use() with a constant of the value of `bytes`, 1 to 8, so that copies need no loop.
template <typename Use>
void WithWidth(uint8_t bytes, Use use) {
  switch (bytes) {
    case 1: return use(std::integral_constant<size_t, 1>());
    case 2: return use(std::integral_constant<size_t, 2>());
    case 3: return use(std::integral_constant<size_t, 3>());
    case 4: return use(std::integral_constant<size_t, 4>());
    case 5: return use(std::integral_constant<size_t, 5>());
    case 6: return use(std::integral_constant<size_t, 6>());
    case 7: return use(std::integral_constant<size_t, 7>());
    default: return use(std::integral_constant<size_t, 8>());
  }
}

// Writes value(i) for i below `count`, in `bytes` bytes each.
template <typename Value>
void PackNumbers(uint8_t bytes, size_t count, Value value, std::byte* out) {
  WithWidth(bytes, [&](auto width) {
    for (size_t i = 0; i < count; ++i) {
      const uint64_t number = value(i);
      std::memcpy(out + i * width, &number, width);
    }
  });
}

// Adds `least` to each. Memory is taken once the reader has shown that the numbers are there; else
// the reader has failed, and the result is empty. `bytes`: at most the size of a Number.
template <typename Number>
std::vector<Number> ReadNumbers(ByteReader* reader, uint8_t bytes, uint64_t count,
                                Number least = 0) {
  // Multiplied only once it cannot overflow.
  const uint64_t size_bytes = count > reader->remaining() ? count : count * bytes;
  const auto packed = reader->GetArray<std::byte>(size_bytes);
  if (!reader->ok()) return {};
  std::vector<Number> numbers(count);
  WithWidth(bytes, [&](auto width) {
    if constexpr (width <= sizeof(Number)) {
      for (size_t i = 0; i < numbers.size(); ++i) {
        Number number = 0;
        std::memcpy(&number, packed.data() + i * width, width);
        numbers[i] = number + least;
      }
    }
  });
  return numbers;
}

}  // namespace persia

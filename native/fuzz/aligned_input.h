// The fuzzer's bytes as a receiver has them: in a Buffer of exactly their size, so that alignment
// holds and a sanitizer sees reads past the end.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/buffer.h"

namespace persia::fuzz {

inline Buffer AlignedInput(const uint8_t* data, size_t size) {
  Buffer buffer(size);
  if (size > 0) std::memcpy(buffer.data(), data, size);
  return buffer;
}

// Reads every element, so that a view that does not lie inside the input is seen.
template <typename Span>
void Touch(const Span& values) {
  for (const auto& value : values) {
    const volatile auto read = value;
    (void)read;
  }
}

}  // namespace persia::fuzz

// What the tests of messages share.
#pragma once

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "base/method.h"

namespace persia::testing {

// The bytes as a receiver sees them: one aligned body, in memory of its own, so that a sanitizer
// sees reads past it.
inline Buffer ToBuffer(std::span<const std::byte> bytes) {
  Buffer buffer(bytes.size());
  if (!bytes.empty()) std::memcpy(buffer.data(), bytes.data(), bytes.size());
  return buffer;
}

inline std::vector<std::byte> Flatten(const Segments& segments) {
  std::vector<std::byte> bytes;
  for (const auto& view : segments.views) bytes.insert(bytes.end(), view.begin(), view.end());
  return bytes;
}

template <typename T>
std::vector<std::byte> EncodeToBytes(T message) {
  return Flatten(EncodeMessage<T>(std::move(message)));
}

}  // namespace persia::testing

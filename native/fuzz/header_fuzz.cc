// DecodeHeader: what it lets through keeps its limits and encodes back to the same bytes.
#include <array>
#include <cstdlib>
#include <cstring>

#include "net/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia::net;  // NOLINT: a fuzz target is one function
  constexpr uint64_t kLimit = 1 << 20;
  if (size < kHeaderBytes) return -1;
  std::array<std::byte, kHeaderBytes> bytes;
  std::memcpy(bytes.data(), data, kHeaderBytes);
  auto header = DecodeHeader(bytes, kLimit);
  if (!header.ok()) return 0;
  if (header->magic != kMagic || header->body_bytes > kLimit) std::abort();
  std::array<std::byte, kHeaderBytes> again;
  EncodeHeader(*header, again);
  if (again != bytes) std::abort();
  return 0;
}

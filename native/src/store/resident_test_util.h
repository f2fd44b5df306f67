// What a process has, and whether that says anything.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace persia::store {

inline uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<uint64_t>(getpagesize());
}

// Sanitizers have memory of their own: what the process uses says nothing then.
#ifdef PERSIA_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace persia::store

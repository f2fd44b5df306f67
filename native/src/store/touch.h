// Touch: brings memory into the cache by reading it.
//
// A prefetch instruction is only a hint: where the address has to be looked up in the page tables
// first, which in a virtual machine is most of the cost of a random access, processors may drop it.
// A read is never dropped. Reads that do not depend on one another overlap all the same, so
// touching the memory of some tens of rows in a loop of its own, and working on them in the next,
// takes little longer than the slowest of them.
#pragma once

#include <atomic>
#include <cstddef>

namespace persia::store {

inline void Touch(const void* address) {
  static_cast<void>(*static_cast<const volatile unsigned char*>(address));
}

// Memory that other threads may be writing. `volatile`: a read whose result nobody uses stays.
template <typename T>
void Touch(const std::atomic<T>& cell) {
  const volatile std::atomic<T>& read = cell;
  static_cast<void>(read.load(std::memory_order_relaxed));
}

// Each cache line of `floats` up to a point, from where the processor follows by itself.
inline void TouchRow(const float* row, size_t floats) {
  constexpr size_t kLineFloats = 16, kMaxFloats = 256;
  for (size_t i = 0; i < floats && i < kMaxFloats; i += kLineFloats) Touch(row + i);
}

}  // namespace persia::store

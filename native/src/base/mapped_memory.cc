#include "base/mapped_memory.h"

#include <sys/mman.h>

#include <cstdint>

namespace persia {
namespace {

std::byte* Map(size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

// mmap aligns to small pages only: map more than is needed and give back both ends.
std::byte* MapAligned(size_t size, size_t alignment) {
  std::byte* data = Map(size + alignment);
  if (data == nullptr) return nullptr;
  const size_t past = reinterpret_cast<uintptr_t>(data) % alignment;
  const size_t head = past == 0 ? 0 : alignment - past;
  if (head > 0) munmap(data, head);
  if (head < alignment) munmap(data + head + size, alignment - head);
  return data + head;
}

}  // namespace

MappedMemory MappedMemory::Allocate(size_t size) {
  size = (size + kPageBytes - 1) / kPageBytes * kPageBytes;
  const bool huge = size >= kHugePageBytes;
  std::byte* data = huge ? MapAligned(size, kHugePageBytes) : Map(size);
  if (data == nullptr) return {};
#ifdef MADV_HUGEPAGE
  // Advice only: where the system refuses, small pages do.
  if (huge) madvise(data, size, MADV_HUGEPAGE);
#endif
  return {data, size};
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace persia

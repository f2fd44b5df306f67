#include "base/page_size.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

namespace persia {

bool AllowsHugePages(const char* setting_file) {
  std::ifstream file(setting_file);
  std::string setting;
  std::getline(file, setting);
  return setting.find("[never]") == std::string::npos;
}

namespace {

// The whole pages among some bytes.
struct Pages {
  Pages(std::byte* bytes, size_t num_bytes) {
    constexpr uintptr_t kPage = MappedMemory::kPageBytes;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(bytes) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(bytes) + num_bytes) / kPage * kPage;
    data = reinterpret_cast<void*>(first);
    size = std::max(first, end) - first;
  }
  void* data;
  size_t size;
};

}  // namespace

size_t ReleasePages(std::byte* data, size_t size) {
  const Pages pages(data, size);
#ifdef MADV_NOHUGEPAGE
  // Or a huge page around it would be made whole again.
  madvise(pages.data, pages.size, MADV_NOHUGEPAGE);
#endif
  return madvise(pages.data, pages.size, MADV_DONTNEED) == 0 ? pages.size : 0;
}

// All that follows is advice: where the system refuses, pages stay as they are.
#ifdef MADV_HUGEPAGE

void UseSmallPages(const MappedMemory& memory) {
  madvise(memory.data(), memory.size(), MADV_NOHUGEPAGE);
}

void UseHugePages(std::byte* data, size_t size) {
  const Pages pages(data, size);
  madvise(pages.data, pages.size, MADV_HUGEPAGE);
}

void MoveToHugePages(const MappedMemory& memory) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1; older headers lack it
  madvise(memory.data(), memory.size(), MADV_HUGEPAGE);
  // Which does not ask for the system's setting.
  static const bool allowed = AllowsHugePages("/sys/kernel/mm/transparent_hugepage/enabled");
  if (allowed) madvise(memory.data(), memory.size(), kCollapse);
}

#else

void UseSmallPages(const MappedMemory&) {}
void UseHugePages(std::byte*, size_t) {}
void MoveToHugePages(const MappedMemory&) {}

#endif

}  // namespace persia

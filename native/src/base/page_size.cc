#include "base/page_size.h"

#include <sys/mman.h>

namespace persia {

// All of it is advice: where the system refuses, pages stay as they are.
#ifdef MADV_HUGEPAGE

void UseSmallPages(const MappedMemory& memory) {
  madvise(memory.data(), memory.size(), MADV_NOHUGEPAGE);
}

void MoveToHugePages(const MappedMemory& memory) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1; older headers lack it
  madvise(memory.data(), memory.size(), MADV_HUGEPAGE);
  madvise(memory.data(), memory.size(), kCollapse);
}

#else

void UseSmallPages(const MappedMemory&) {}
void MoveToHugePages(const MappedMemory&) {}

#endif

}  // namespace persia

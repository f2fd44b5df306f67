#include "base/page_size.h"

#include <sys/mman.h>

#include <fstream>
#include <string>

namespace persia {

bool AllowsHugePages(const char* setting_file) {
  std::ifstream file(setting_file);
  std::string setting;
  std::getline(file, setting);
  return setting.find("[never]") == std::string::npos;
}

// All of it is advice: where the system refuses, pages stay as they are.
#ifdef MADV_HUGEPAGE

void UseSmallPages(const MappedMemory& memory) {
  madvise(memory.data(), memory.size(), MADV_NOHUGEPAGE);
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
void MoveToHugePages(const MappedMemory&) {}

#endif

}  // namespace persia

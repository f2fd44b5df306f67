// The size of the pages that a MappedMemory lies on, where its owner knows better than the default.
#pragma once

#include <cstddef>

#include "base/mapped_memory.h"

namespace persia {

// For memory that has not been touched: only what will be takes memory.
void UseSmallPages(const MappedMemory& memory);

// Gives the pages that lie within these bytes of a MappedMemory back to the system: they are zero,
// and take no memory until they are written again, when they are small. Returns how many bytes.
size_t ReleasePages(std::byte* data, size_t size);

// Undoes that they will be small: their pages may be huge, together with those around them.
void UseHugePages(std::byte* data, size_t size);

// Puts what lies on small pages onto huge ones, at once where the system can, else when it finds
// time. Others may use the memory meanwhile.
void MoveToHugePages(const MappedMemory& memory);

// The system's setting, as it stands in a file: `always madvise [never]` is what forbids them.
bool AllowsHugePages(const char* setting_file);

}  // namespace persia

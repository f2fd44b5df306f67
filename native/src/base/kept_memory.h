// Memory of a process that frees much at once and soon needs as much again.
#pragma once

#include <cstddef>

namespace persia {

// From now on this process keeps the memory of a freed MappedMemory of a huge page or more for
// later ones of the same size. When another size is needed, it unmaps as much, the oldest first:
// the process stays at its peak. A hypervisor may take back memory that a virtual machine frees,
// and stop its processors for that time (ADR 59).
void KeepFreedMemory();

// What is kept now.
size_t KeptMemoryBytes();

}  // namespace persia

// Incarnations: random numbers that tell one life of a server or worker from the next.
#pragma once

#include <cstdint>

namespace persia {

// Never 0, which stands for "none" in messages.
uint64_t DrawIncarnation();

}  // namespace persia

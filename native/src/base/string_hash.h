// The ID of a string: XXH64 of its bytes with seed 0, as any implementation of XXH64 has it.
//
// Part of what users store (models know rows by these IDs): it never changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace persia {

uint64_t StringHash(std::string_view bytes);

// Many strings, as Arrow has them: ids[i] is that of data[offsets[i] .. offsets[i + 1]), for the
// offsets.size() - 1 strings. kInvalidArgument: an offset outside the data, or less than the one
// before.
// One call for a column: a call for each string from Python would cost more than the hash. Runs
// without the GIL, and needs nothing but its arguments.
Status HashStrings(std::span<const int64_t> offsets, std::span<const std::byte> data,
                   uint64_t* ids);

}  // namespace persia

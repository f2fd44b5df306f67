#include "base/string_hash.h"

#include <string>

// All of the library that is needed, in this file alone: nothing to link.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace persia {

uint64_t StringHash(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

Status HashStrings(std::span<const int64_t> offsets, std::span<const std::byte> data,
                   uint64_t* ids) {
  const auto* chars = reinterpret_cast<const char*>(data.data());
  const auto size = static_cast<int64_t>(data.size());
  for (size_t i = 1; i < offsets.size(); ++i) {
    const int64_t begin = offsets[i - 1], end = offsets[i];
    // Offsets come from Arrow arrays of the caller's data, which may be damaged or sliced.
    if (begin < 0 || end < begin || end > size) {
      return InvalidArgument("string ", i - 1, " lies at ", begin, " to ", end, " of ", size,
                             " bytes");
    }
    ids[i - 1] = StringHash({chars + begin, static_cast<size_t>(end - begin)});
  }
  return Status::Ok();
}

}  // namespace persia

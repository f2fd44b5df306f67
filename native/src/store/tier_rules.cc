#include "store/tier_rules.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <vector>

#include "pool/pool_file.h"

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace persia::store {
namespace {

// Of the file; the encoded rules follow.
struct Head {
  uint64_t check;  // of what follows
  uint64_t pool_id;
};

uint64_t CheckOf(const Head& head, std::span<const std::byte> encoded) {
  return XXH3_64bits_withSeed(encoded.data(), encoded.size(), head.pool_id);
}

std::string PathOf(const std::string& directory) { return directory + "/rules"; }

}  // namespace

// Written beside the old file, then renamed over it: a crash leaves one of the two whole. The new
// file is synced before the renaming, the directory after it.
Status SaveRules(const std::string& directory, const SavedRules& rules) {
  const std::string path = PathOf(directory), fresh = path + ".new";
  const std::vector<std::byte> encoded = rules.config.Encode();
  Head head{.check = 0, .pool_id = rules.pool_id};
  head.check = CheckOf(head, encoded);
  {
    std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&head), sizeof(head));
    file.write(reinterpret_cast<const char*>(encoded.data()),
               static_cast<std::streamsize>(encoded.size()));
    file.flush();
    if (!file) return pool::SystemError("cannot write", fresh);
  }
  PERSIA_RETURN_IF_ERROR(pool::SyncPath(fresh, O_RDONLY));
  if (::rename(fresh.c_str(), path.c_str()) != 0) return pool::SystemError("cannot rename", fresh);
  return pool::SyncPath(directory, O_RDONLY | O_DIRECTORY);
}

StatusOr<std::optional<SavedRules>> LoadRules(const std::string& directory) {
  const std::string path = PathOf(directory);
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    if (errno == ENOENT) return std::optional<SavedRules>();
    return pool::SystemError("cannot read", path);
  }
  // Some kilobytes at most.
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  Head head{};
  if (bytes.size() >= sizeof(head)) std::memcpy(&head, bytes.data(), sizeof(head));
  const auto encoded =
      std::as_bytes(std::span(bytes)).subspan(std::min(sizeof(head), bytes.size()));
  if (bytes.size() < sizeof(head) || head.check != CheckOf(head, encoded)) {
    return Corruption(path,
                      " is damaged, and the pool beside it cannot be used without; remove "
                      "both and load a checkpoint");
  }
  PERSIA_ASSIGN_OR_RETURN(TrainConfig config, TrainConfig::Decode(encoded));
  return std::optional(SavedRules{head.pool_id, std::move(config)});
}

}  // namespace persia::store

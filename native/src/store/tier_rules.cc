#include "store/tier_rules.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <vector>

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace persia::store {
namespace {

using Check = XXH64_hash_t;

std::string PathOf(const std::string& directory) { return directory + "/rules"; }

Status Refused(const std::string& what, const std::string& path) {
  return IOError("cannot " + what + " " + path + ": " + std::strerror(errno));
}

Status SyncPath(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC);
  if (fd < 0) return Refused("open", path);
  const bool is_synced = ::fsync(fd) == 0;
  const Status status = is_synced ? Status::Ok() : Refused("sync", path);
  ::close(fd);
  return status;
}

}  // namespace

Status SaveRules(const std::string& directory, const TrainConfig& config) {
  const std::string path = PathOf(directory), fresh = path + ".new";
  const std::vector<std::byte> bytes = config.Encode();
  const Check check = XXH3_64bits(bytes.data(), bytes.size());
  {
    std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&check), sizeof(check));
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    file.flush();
    if (!file) return Refused("write", fresh);
  }
  PERSIA_RETURN_IF_ERROR(SyncPath(fresh, O_RDONLY));
  if (::rename(fresh.c_str(), path.c_str()) != 0) return Refused("rename", fresh);
  return SyncPath(directory, O_RDONLY | O_DIRECTORY);
}

StatusOr<std::optional<TrainConfig>> LoadRules(const std::string& directory) {
  const std::string path = PathOf(directory);
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    if (errno == ENOENT) return std::optional<TrainConfig>();
    return Refused("read", path);
  }
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  Check check = 0;
  if (bytes.size() >= sizeof(check)) std::memcpy(&check, bytes.data(), sizeof(check));
  const auto encoded =
      std::as_bytes(std::span(bytes)).subspan(std::min(sizeof(check), bytes.size()));
  if (bytes.size() < sizeof(check) || check != XXH3_64bits(encoded.data(), encoded.size())) {
    return Corruption(path +
                      " is damaged, and the pool beside it cannot be used without; remove "
                      "both and load a checkpoint");
  }
  auto config = TrainConfig::Decode(encoded);
  PERSIA_RETURN_IF_ERROR(config.status());
  return std::optional(std::move(*config));
}

}  // namespace persia::store

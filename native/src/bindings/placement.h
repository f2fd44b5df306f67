// Moved virtual shards as Python has them: pairs of a virtual shard and its server.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/placement.h"

namespace persia::bindings {

using MovedShards = std::vector<std::pair<uint16_t, uint16_t>>;

inline std::vector<MovedShard> FromPython(const MovedShards& moved) {
  std::vector<MovedShard> shards;
  for (const auto& [shard, server] : moved) shards.push_back({shard, server});
  return shards;
}

inline MovedShards ToPython(std::span<const MovedShard> moved) {
  MovedShards pairs;
  for (const auto& [shard, server] : moved) pairs.emplace_back(shard, server);
  return pairs;
}

}  // namespace persia::bindings

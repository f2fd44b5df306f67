#include "base/placement.h"

#include <utility>

namespace persia {

std::shared_ptr<Placement::Table> Placement::MakeTable(uint32_t num_servers) {
  auto table = std::make_shared<Table>();
  table->num_servers = num_servers;
  uint32_t next = 0;  // faster than a division for each: a rank decodes one with each answer
  for (uint16_t& server : table->servers) {
    server = static_cast<uint16_t>(next);
    if (++next >= num_servers) next = 0;
  }
  return table;
}

// One server is the usual case in a process of its own, and of each plan before it is made.
Placement::Placement(uint32_t num_servers) {
  static const std::shared_ptr<const Table> of_one = MakeTable(1);
  table_ = num_servers == 1 ? of_one : MakeTable(num_servers);
}

StatusOr<Placement> Placement::Create(uint32_t num_servers, uint64_t generation,
                                      std::span<const MovedShard> moved) {
  auto table = MakeTable(num_servers);
  table->generation = generation;
  table->moved.assign(moved.begin(), moved.end());
  ShardSet seen;
  for (const auto [shard, server] : moved) {
    if (shard >= kNumVirtualShards || server >= num_servers || seen.test(shard)) {
      return InvalidArgument("virtual shard ", shard, " cannot be moved to server ", server, " of ",
                             num_servers);
    }
    seen.set(shard);
    table->servers[shard] = server;
  }
  return Placement(std::move(table));
}

ShardSet Placement::ShardsOf(uint32_t server) const {
  ShardSet shards;
  for (uint32_t shard = 0; shard < kNumVirtualShards; ++shard) {
    shards[shard] = ServerOfShard(shard) == server;
  }
  return shards;
}

}  // namespace persia

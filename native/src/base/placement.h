// Placement: which parameter server has the rows of each virtual shard.
//
// Without moved shards, virtual shard v belongs to server v mod the number of servers. A change of
// the servers may move some of them by measured load (ADR 67).
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/hash.h"
#include "base/status.h"

namespace persia {

// A virtual shard that another server has than the default one. On the wire as in memory.
struct MovedShard {
  uint16_t shard = 0;
  uint16_t server = 0;
  bool operator==(const MovedShard&) const = default;
};
static_assert(sizeof(MovedShard) == 4);

using ShardSet = std::bitset<kNumVirtualShards>;

// Cheap to copy; never changes.
class Placement {
 public:
  // Without moved shards. From a number, as most servers are placed so.
  Placement(uint32_t num_servers = 1);  // NOLINT(google-explicit-constructor)
  // `generation`: of the servers. Servers that replace others have a higher one.
  // kInvalidArgument: there is no such shard or server, or a shard is moved twice.
  static StatusOr<Placement> Create(uint32_t num_servers, uint64_t generation,
                                    std::span<const MovedShard> moved);

  uint32_t num_servers() const { return table_->num_servers; }
  uint64_t generation() const { return table_->generation; }
  std::span<const MovedShard> moved() const { return table_->moved; }
  uint32_t ServerOfShard(uint32_t shard) const { return table_->servers[shard]; }
  uint32_t ServerOf(uint64_t sign_hash) const { return ServerOfShard(VirtualShard(sign_hash)); }
  ShardSet ShardsOf(uint32_t server) const;

  // Whether requests that are routed by one may be sent to the servers of the other.
  bool operator==(const Placement& other) const {
    return table_ == other.table_ ||
           (num_servers() == other.num_servers() && generation() == other.generation() &&
            table_->moved == other.table_->moved);
  }

 private:
  struct Table {
    uint32_t num_servers = 1;
    uint64_t generation = 0;
    std::vector<MovedShard> moved;
    std::array<uint16_t, kNumVirtualShards> servers = {};
  };

  explicit Placement(std::shared_ptr<const Table> table) : table_(std::move(table)) {}
  static std::shared_ptr<Table> MakeTable(uint32_t num_servers);

  std::shared_ptr<const Table> table_;
};

}  // namespace persia

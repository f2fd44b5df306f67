// ShardLoads: how many rows of each virtual shard a server has looked up, by a sample.
//
// A change of the servers places virtual shards by how much the counts grow (ADR 67). Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"

namespace persia::server {

class ShardLoads {
 public:
  // Of one request in kRequestsPerSample; the others cost one addition.
  void Count(std::span<const uint64_t> signs) {
    if (num_requests_.fetch_add(1, std::memory_order_relaxed) % kRequestsPerSample == 0) Add(signs);
  }
  // By virtual shard. Counts only grow: those of two servers can be compared over the same time.
  std::vector<uint64_t> counts() const { return {counts_.begin(), counts_.end()}; }

 private:
  // A prime number: workers that ask for their slots by turns are all sampled.
  static constexpr uint64_t kRequestsPerSample = 17;

  void Add(std::span<const uint64_t> signs);

  std::atomic<uint64_t> num_requests_ = 0;
  std::array<std::atomic<uint64_t>, kNumVirtualShards> counts_ = {};
};

}  // namespace persia::server

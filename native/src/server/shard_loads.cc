#include "server/shard_loads.h"

namespace persia::server {

// Loads and stores instead of atomic additions, which cost more: threads that count at once may
// lose some of a sample.
void ShardLoads::Add(std::span<const uint64_t> signs) {
  for (const uint64_t sign : signs) {
    std::atomic<uint64_t>& count = counts_[VirtualShard(SignHash(sign))];
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

}  // namespace persia::server

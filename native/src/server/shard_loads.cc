#include "server/shard_loads.h"

namespace persia::server {

// Loads and stores instead of atomic additions, which cost more: threads that count at once may
// lose some of a sample.
void ShardLoads::Add(std::span<const uint64_t> signs) {
  const auto change = [](std::atomic<uint64_t>& count, auto next) {
    count.store(next(count.load(std::memory_order_relaxed)), std::memory_order_relaxed);
  };
  for (const uint64_t sign : signs) {
    change(counts_[VirtualShard(SignHash(sign))], [](uint64_t count) { return count + 1; });
  }
  const uint64_t before = num_counted_.fetch_add(signs.size(), std::memory_order_relaxed);
  if (before >= kMaxCounted || before + signs.size() < kMaxCounted) return;
  // The one request that reaches the limit.
  for (auto& count : counts_) change(count, [](uint64_t value) { return value / 2; });
  num_counted_.store(kMaxCounted / 2, std::memory_order_relaxed);
}

}  // namespace persia::server

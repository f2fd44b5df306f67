// Hashing of 64-bit signs: routing and hash stacks share one hash.
//
// SignHash is FarmHash64 (Geoff Pike, Google, 2014) of the sign's eight
// little-endian bytes, as the published system used it, so that its hash-stack
// vectors hold here too. The store scrambles signs in a way of its own
// (store/sign_index.h), so that being on one server says nothing about a sign's place there.
#pragma once

#include <bit>
#include <cstdint>

namespace persia {

// A server holds whole virtual shards, and a checkpoint file has rows of one virtual shard in each
// block: with 4,096 of them a job can have that many servers, and a block stays large.
inline constexpr uint32_t kVirtualShardBits = 12;
// Fixed for the life of every checkpoint: a sign's virtual
// shard never changes, only the server that holds it.
inline constexpr uint32_t kNumVirtualShards = 1u << kVirtualShardBits;

// Not a secure hash: a sender that chooses its IDs can route all of them to one server.
inline uint64_t SignHash(uint64_t sign) {
  constexpr uint64_t k2 = 0x9ae16a3b2f90404fULL;
  constexpr uint64_t mul = k2 + 2 * sizeof(uint64_t);
  const uint64_t a = sign + k2;
  const uint64_t b = sign;
  const uint64_t c = std::rotr(b, 37) * mul + a;
  const uint64_t d = (std::rotr(a, 25) + b) * mul;
  uint64_t x = (c ^ d) * mul;
  x ^= x >> 47;
  uint64_t y = (d ^ x) * mul;
  y ^= y >> 47;
  return y * mul;
}

// Top 12 bits.
inline uint32_t VirtualShard(uint64_t sign_hash) {
  return static_cast<uint32_t>(sign_hash >> (64 - kVirtualShardBits));
}

}  // namespace persia

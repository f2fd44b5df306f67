// RecentLookups: where the rows of the latest training lookups are, so that their updates need no
// second search (ADR 65).
//
// An update that names the signs of a remembered lookup, all of them and in their order, uses that
// lookup's grouping by shard and its cells. A shard checks that it has removed no row since. Any
// other update searches, with the same result: what is remembered only saves time.
//
// Thread-safe. Not for a store with a tier, which moves rows.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "store/signs_by_shard.h"
#include "store/types.h"

namespace persia::store {

// Of one lookup. Used by one call at a time.
struct FoundRows {
  SignsByShard signs;
  std::vector<uint32_t> cells;             // by row of the request
  std::vector<FoundCells> cells_by_shard;  // views of `cells`
  uint64_t sample = 0;                     // SampleOf() of the request

  // Before a lookup of the request that `signs` was built of.
  void Begin(uint32_t num_shards);
  // That the latest request needed for its rows.
  size_t row_bytes() const {
    return signs.num_rows() * (sizeof(uint64_t) + sizeof(RowRef) + sizeof(uint32_t));
  }
  size_t memory_bytes() const {
    return sizeof(*this) + signs.memory_bytes() + cells.capacity() * sizeof(uint32_t) +
           cells_by_shard.capacity() * sizeof(FoundCells);
  }
};

class RecentLookups {
 public:
  // Of all memory here, 28 bytes a row. Older lookups are forgotten.
  static constexpr size_t kMaxBytes = size_t{32} << 20;
  // Of one lookup. Larger ones are not remembered: one of them would displace many others.
  static constexpr size_t kMaxLookupBytes = kMaxBytes / 8;
  static constexpr size_t kMaxKept = 64;  // lookups, through which Take() searches

  // Memory for a lookup, of an earlier one where there is any.
  std::unique_ptr<FoundRows> Begin();
  // Remembers a lookup of `blocks`.
  void Keep(std::span<const RowBlock> blocks, std::unique_ptr<FoundRows> rows);
  // The latest lookup of the same blocks, which is forgotten; null: none is remembered.
  std::unique_ptr<FoundRows> Take(std::span<const RowBlock> blocks);
  // The memory serves another lookup.
  void End(std::unique_ptr<FoundRows> rows);
  uint64_t memory_bytes() const;

 private:
  static constexpr size_t kMaxUnused = 4;

  struct List {
    std::deque<std::unique_ptr<FoundRows>> rows;  // the oldest first
    size_t bytes = 0;

    void Add(std::unique_ptr<FoundRows> added);
    std::unique_ptr<FoundRows> Remove(size_t place);
  };

  // False: the caller frees it, after it has released the mutex.
  bool Reuse(std::unique_ptr<FoundRows>* rows);

  mutable std::mutex mutex_;  // guards what follows
  List kept_;
  List unused_;  // takes what kept_ leaves of kMaxBytes
};

}  // namespace persia::store

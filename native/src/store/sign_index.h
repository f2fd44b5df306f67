// SignIndex: finds a sign's slot; an open-addressing table of 8-byte entries.
//
// An entry is the sign's tag (32 bits of its hash) above its slot. The
// home position grows with the tag, and the table is kept in ascending
// order of entries: linear probing whose runs are sorted. It follows that
//  * a search, successful or not, ends at the first entry that is not smaller, so the table can be
//    4/5 full;
//  * growing copies from front to back, sequentially, and may be by any factor: a quarter at a time
//    here, so that an entry costs 10 to 14 bytes;
//  * removal closes the gap by moving followers back: no tombstones.
// The sign itself is not stored here: the caller,
// who has it beside the row, confirms a tag's match.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/mapped_memory.h"

namespace persia::store {

class SignIndex {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;  // never a slot

  // The slot among those with this tag for which `matches(slot)` holds, or kNone.
  template <typename Matches>
  uint32_t Find(uint32_t tag, Matches matches) const {
    for (const uint64_t* entry = entries_ + Home(tag);; ++entry) {
      const auto entry_tag = static_cast<uint32_t>(*entry >> 32);
      if (entry_tag < tag) continue;
      const auto slot = static_cast<uint32_t>(*entry);
      if (entry_tag != tag || slot == kNone) return kNone;
      if (matches(slot)) return slot;
    }
  }
  // A guess to prefetch by: nearly always the only slot with this tag.
  uint32_t FindFirst(uint32_t tag) const {
    return Find(tag, [](uint32_t) { return true; });
  }
  void Prefetch(uint32_t tag) const { __builtin_prefetch(entries_ + Home(tag)); }

  // False when there is no memory to grow; the index
  // is then unchanged. The entry must not be there.
  [[nodiscard]] bool Insert(uint32_t tag, uint32_t slot);
  // The entry must be there.
  void Erase(uint32_t tag, uint32_t slot);
  void Clear();

  uint64_t size() const { return size_; }
  uint64_t memory_bytes() const { return memory_.size(); }

 private:
  static constexpr uint64_t kEmpty = UINT64_MAX;

  uint64_t Home(uint32_t tag) const { return (tag * home_count_) >> 32; }
  bool Grow();
  bool Rebuild(uint64_t home_count, uint64_t tail);

  // What an index without memory reads: one empty entry. Never written.
  static inline uint64_t no_entries_ = kEmpty;

  MappedMemory memory_;
  uint64_t* entries_ = &no_entries_;
  uint64_t length_ = 1;  // entries in memory; the last one is always empty, so that searches end
  uint64_t home_count_ = 0;  // the entries behind take the overflow of the last homes
  uint64_t size_ = 0;
};

}  // namespace persia::store

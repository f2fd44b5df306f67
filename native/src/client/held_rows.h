// HeldRows: whole rows at a rank with consistency="exact", by sign, and when they were used last.
//
// A row that a batch needs has a stamp of at least that batch's number. Trim() evicts only rows
// with older stamps than the oldest batch that needs rows. So a batch neither counts the rows that
// it holds nor releases them one by one.
//
// Bounded by `max_bytes`, and by the rows of batches that need them. A freed cell serves rows of
// one shape alone, so the memory can exceed the rows: see IsWasteful(). Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "store/row_slabs.h"
#include "store/sign_index.h"

namespace persia::client {

class HeldRows {
 public:
  static constexpr uint32_t kNoCell = store::RowSlabs::kNoCell;

  static constexpr uint64_t kSpareBytes = 16 << 20;

  explicit HeldRows(uint64_t max_bytes, uint64_t spare_bytes = kSpareBytes)
      : max_bytes_(max_bytes), spare_bytes_(spare_bytes) {}

  // Fills in the cells of signs that are held, which batch number `batch` uses from now on; those
  // of others become kNoCell. Returns how many are held. Batch numbers must not decrease.
  uint64_t Use(std::span<const uint64_t> signs, uint64_t batch, std::span<uint32_t> cells);
  struct Inserted {
    uint32_t cell;
    bool is_new;  // false: the row was held already, and its values stay
  };
  // kResourceExhausted: no memory.
  StatusOr<Inserted> Insert(uint64_t sign, const store::RowShape& shape, const float* floats,
                            uint64_t batch);
  // Removes a row that was new, before another batch uses it.
  void Drop(uint64_t sign);
  // Evicts rows beyond the bound that no batch from `oldest` on has used, the oldest ones first,
  // about. Walks a bounded part of the index, in proportion to the rows inserted while no more rows
  // could be evicted. If there is no such batch, so that nothing waits, it walks until the rows
  // beyond an eighth above the bound are evicted.
  void Trim(uint64_t oldest);
  // Whether Compact() is worth its copies: the memory is more than half above the rows or the
  // bound, whichever is more, and `spare_bytes` beyond that. A small job never compacts.
  bool IsWasteful() const;
  // Moves the rows that batches from `oldest` on have used into memory of their own, evicts all
  // others, and frees the rest. Find() then has the new cells. False: no memory, nothing changed.
  bool Compact(uint64_t oldest);
  // Replaces cells of before Compact() by those of now; kNoCell stays.
  void Find(std::span<const uint64_t> signs, std::span<uint32_t> cells) const;
  // All rows. No batch may need any.
  void Clear();

  store::RowView View(uint32_t cell) const { return slabs_.View(cell); }
  const float* values(uint32_t cell) const { return slabs_.values(cell); }
  // The first two cache lines of the row, or nothing for kNoCell.
  void Prefetch(uint32_t cell) const {
    if (cell == kNoCell) return;
    __builtin_prefetch(slabs_.values(cell), 1);
    __builtin_prefetch(slabs_.values(cell) + 16, 1);
  }
  uint64_t size() const { return index_.size(); }
  uint64_t memory_bytes() const { return index_.memory_bytes() + slabs_.memory_bytes(); }

 private:
  static constexpr uint64_t kRecent = 4096;  // batches whose rows are counted each for itself

  void AdvanceTo(uint64_t batch);
  void Count(uint32_t stamp, int64_t change);
  void Touch(store::SignIndex::Entry* entry, uint64_t batch);
  void Remove(store::SignIndex::Entry* entry);
  uint64_t Walk(uint32_t cutoff, uint64_t num_visits);
  uint64_t Cutoff(uint64_t oldest, uint64_t* num_older) const;

  const uint64_t max_bytes_, spare_bytes_;
  store::SlabMemory memory_;
  store::RowSlabs slabs_{&memory_};
  store::SignIndex index_;                    // the low 32 bits of a batch's number are its stamp
  uint64_t newest_ = 0;                       // batch
  uint64_t num_bytes_ = 0;                    // of the rows
  uint64_t num_older_ = 0;                    // rows that no recent batch has used
  std::array<uint64_t, kRecent> num_used_{};  // rows by the recent batch that used them last
  uint64_t num_inserted_ = 0;                 // since the last walk of Trim()
  uint64_t next_key_ = 0;                     // where the next walk of Trim() begins
};

}  // namespace persia::client

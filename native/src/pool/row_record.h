// RowRecord: the layout of one version of one row in a cell.
//
// A version lives from the batch that made it up to the batch that replaced it by another or
// removed the row: as of checkpoint c, a row is the version with `version` <= c < `end`. So
// recovery decides about each cell from its record alone, in any order.
//
// `check` covers all but `end`, which is written once more, on its own, when the version ends: 8
// bytes, which no failure tears. `end` carries a tag from `check` above the batch's number, for a
// cell is used again: where a failure leaves the old record with an `end` that was meant for the
// new one, the old one must not seem to live again. (Both lie in the same 16 bytes, so processors
// and disks do not mix them; then the tag is not even needed.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace persia::pool {

struct RowHead {
  uint64_t sign = 0;
  uint64_t version = 0;  // the batch that made these values
  uint32_t dim = 0;
  uint32_t state_floats = 0;  // behind the embedding
  uint32_t scalar = 0;        // 0 where the optimizer has none
  uint32_t has_scalar = 0;

  size_t num_floats() const { return size_t{dim} + state_floats; }
};

struct RowRecord {
  uint64_t check;
  uint64_t end;
  RowHead head;  // then the floats

  // What `end` is when the version ends with the batch.
  uint64_t EndAt(uint64_t batch) const { return (check & ~kNever) | batch; }
  bool HasEnded() const { return end != EndAt(kNever); }
  bool IsAliveAt(uint64_t batch) const {
    return head.version <= batch && ((end ^ check) & ~kNever) == 0 && (end & kNever) > batch;
  }

  static constexpr uint64_t kNever = (uint64_t{1} << 40) - 1;  // batches are below it
};
static_assert(sizeof(RowRecord) == 48);

// Bytes of a cell for rows of so many floats: whole 16 bytes.
inline size_t CellBytes(size_t num_floats) {
  return (sizeof(RowRecord) + num_floats * sizeof(float) + 15) / 16 * 16;
}

// The cell's own: a record is valid only where it was written, and while its extent has its number.
inline uint64_t RecordSeed(uint64_t extent_id, uint64_t address) { return extent_id ^ address; }

// Fills the cell's bytes from the front; the rest is zero.
void EncodeRecord(const RowHead& head, const float* values, uint64_t seed,
                  std::span<std::byte> cell);
// Whether the bytes are a whole record that fits them; then its beginning is in *record.
bool DecodeRecord(std::span<const std::byte> cell, uint64_t seed, RowRecord* record);

}  // namespace persia::pool

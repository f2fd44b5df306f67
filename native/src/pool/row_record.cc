#include "pool/row_record.h"

#include <cstring>

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace persia::pool {
namespace {

constexpr size_t kRowCheckedFrom = offsetof(RowRecord, head);

uint64_t CheckOf(const std::byte* cell, size_t num_floats, uint64_t seed) {
  const size_t bytes = sizeof(RowHead) + num_floats * sizeof(float);
  return XXH3_64bits_withSeed(cell + kRowCheckedFrom, bytes, seed);
}

}  // namespace

void EncodeRecord(const RowHead& head, const float* values, uint64_t seed,
                  std::span<std::byte> cell) {
  const size_t value_bytes = head.num_floats() * sizeof(float);
  RowRecord record{.check = 0, .end = 0, .head = head};
  std::memcpy(cell.data(), &record, sizeof(record));
  std::memcpy(cell.data() + sizeof(record), values, value_bytes);
  const size_t used = sizeof(record) + value_bytes;
  std::memset(cell.data() + used, 0, cell.size() - used);
  // The check is computed over the cell's bytes, so head and values are copied there first.
  record.check = CheckOf(cell.data(), head.num_floats(), seed);
  record.end = record.EndAt(RowRecord::kNever);
  std::memcpy(cell.data(), &record, kRowCheckedFrom);
}

// The bytes may be anything: an old record, or one that a crash left half written. Nothing is read
// beyond the cell before its length was checked.
bool DecodeRecord(std::span<const std::byte> cell, uint64_t seed, RowRecord* record) {
  std::memcpy(record, cell.data(), sizeof(*record));
  if (record->head.dim == 0) return false;
  const size_t num_floats = record->head.num_floats();
  return sizeof(*record) + num_floats * sizeof(float) <= cell.size() &&
         record->check == CheckOf(cell.data(), num_floats, seed);
}

}  // namespace persia::pool

// RowRecords: copies of rows, one behind the other, each with a head that describes it.
//
// How a snapshot hands rows to whoever encodes them: one buffer of many rows instead of an
// allocation for each. Cleared and used again, it keeps its memory. Records differ in length, so
// they can only be walked through from the first one.
//
// Values are float32 whatever the store's row format is: files know no other.
//
// Not thread-safe. Movable: who takes the buffer owns it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/buffer.h"

namespace persia::store {

// Precedes the row's values: the embedding, then the optimizer state, all float32.
struct RowHead {
  uint64_t sign = 0;
  uint32_t age = 0;     // batches from its last use to the snapshot point, in its shard
  uint32_t scalar = 0;  // 0 where the optimizer has none
  uint32_t has_scalar = 0;
  uint32_t dim = 0;
  uint32_t state_floats = 0;
  uint32_t unused = 0;  // keeps the values behind the head on 8 bytes

  size_t num_floats() const { return size_t{dim} + state_floats; }
  // Heads stay aligned: records are whole multiples of 8 bytes.
  size_t record_bytes() const {
    return sizeof(RowHead) + (num_floats() * sizeof(float) + 7) / 8 * 8;
  }
};

// Used by snapshots (rows that were read, rows that training saved before it changed them), by
// BlockWriter, and by what sends rows to other servers.
class RowRecords {
 public:
  // Copies `values`: the embedding, then the state. Allocates where HasRoom() is false, to twice
  // what is needed; throws std::bad_alloc where there is no memory.
  void Add(const RowHead& head, const float* values) {
    std::memcpy(Append(head), values, head.num_floats() * sizeof(float));
  }
  // A head of dim 0, without values: the sign had a row before, and has none at the snapshot point.
  void AddRemoval(uint64_t sign) { Append({.sign = sign}); }

  // Calls visit(head, values) for each row in the order of Add(). Pointers are into the buffer, and
  // valid until it changes.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (size_t position = 0; position < num_bytes_;) {
      const auto* head = reinterpret_cast<const RowHead*>(buffer_.data() + position);
      visit(*head, reinterpret_cast<const float*>(head + 1));
      position += head->record_bytes();
    }
  }

  // Room for so many bytes of records, the present ones included; only ever grows.
  // The caller asks for the right size at once where it knows it: each call copies what is in the
  // buffer. Must not be called with less than num_bytes().
  void Reserve(size_t num_bytes) {
    Buffer buffer(num_bytes);
    if (num_bytes_ > 0) std::memcpy(buffer.data(), buffer_.data(), num_bytes_);
    buffer_ = std::move(buffer);
  }
  // The memory stays.
  void Clear() { num_bytes_ = num_rows_ = 0; }
  // Whether a record of so many bytes can be added without an allocation.
  bool HasRoom(size_t num_bytes) const { return num_bytes_ + num_bytes <= buffer_.size(); }
  uint64_t capacity_bytes() const { return buffer_.size(); }
  // Removals included.
  size_t num_rows() const { return num_rows_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  // Returns where the values go.
  // Doubles, so that a buffer that is used again soon has its final size.
  std::byte* Append(const RowHead& head) {
    const size_t record_bytes = head.record_bytes();
    if (num_bytes_ + record_bytes > buffer_.size()) Reserve(2 * (num_bytes_ + record_bytes));
    std::byte* record = buffer_.data() + num_bytes_;
    std::memcpy(record, &head, sizeof(head));
    num_bytes_ += record_bytes;
    ++num_rows_;
    return record + sizeof(head);
  }

  Buffer buffer_;
  size_t num_bytes_ = 0;
  size_t num_rows_ = 0;
};

}  // namespace persia::store

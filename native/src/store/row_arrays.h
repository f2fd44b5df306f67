// RowArrays: rows of feature groups whose IDs are below a bound, each at the place of its ID.
//
// The rows of such a group are one array, in the order of IDs. A lookup computes a row's address
// from its ID: it needs no hash, no search and no table to number the IDs. An ID without a row has
// zeros in its place, so a lookup for inference need not ask whether there is a row.
//
// The index of a shard (sign_index.h) has an entry for each of these rows as well. It answers all
// calls but those of InPlaceRows, and eviction, expiry, admission and snapshots work through it.
// Only the stamps of the rows are here, because a lookup for training writes them.
//
// All internal shards share an array. A cell number below num_cells() is a place in an array, and
// has the same meaning in every shard.
//
// Beside its row, an ID has 8 bytes (IdState). Memory is taken by the huge page: of rows when a row
// in it is inserted, of IdStates when a training batch has an ID in it, with or without a row.
//
// Thread safety: as the rows of a shard. A place belongs to the shard of its sign.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/mapped_memory.h"
#include "base/status.h"
#include "store/row_slabs.h"

namespace persia::store {

class RowPolicies;

// A group with an array, as the owner of the store asks for it.
struct RowArraySpec {
  uint64_t first_sign = 0;  // that of ID 0; the other IDs follow
  uint64_t num_ids = 0;
  uint32_t dim = 0;
};

// Zeroed memory whose pages are taken when they are written first; counts them. Thread-safe.
class SparsePages {
 public:
  // data() is null: no addresses.
  explicit SparsePages(size_t num_bytes)
      : memory_(MappedMemory::AllocateSparse(num_bytes)),
        is_used_(memory_.size() / MappedMemory::kHugePageBytes + 1) {}

  std::byte* data() const { return memory_.data(); }
  // These bytes are written.
  void Use(size_t offset, size_t num_bytes) {
    const size_t last = (offset + num_bytes - 1) / MappedMemory::kHugePageBytes;
    for (size_t page = offset / MappedMemory::kHugePageBytes; page <= last; ++page) {
      if (!is_used_[page].load(std::memory_order_relaxed)) [[unlikely]]
        Count(page);
    }
  }
  uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }

 private:
  void Count(size_t page);

  const MappedMemory memory_;
  std::vector<std::atomic<bool>> is_used_;
  std::atomic<uint64_t> used_bytes_ = 0;
};

class RowArray {
 public:
  static constexpr uint64_t kMaxIds = uint64_t{1} << 31;
  static constexpr uint32_t kSlabCells = 1u << 16;

  struct IdState {
    uint32_t number;  // of the ID in the batch that used it last; the top bit: there is a row
    uint32_t stamp;   // of the row
  };
  static constexpr uint32_t kHasRow = 1u << 31;

  // Is empty, and takes no memory, until rows are inserted. data() is null: no memory.
  RowArray(const RowArraySpec& spec, const RowShape& shape, uint32_t first_cell);

  const RowArraySpec& spec() const { return spec_; }
  const RowShape& shape() const { return shape_; }
  bool has_memory() const {
    return values_.data() != nullptr && scalars_.data() != nullptr && states_.data() != nullptr;
  }
  uint32_t num_slabs() const {
    return static_cast<uint32_t>((spec_.num_ids + kSlabCells - 1) / kSlabCells);
  }
  // Whether the sign is one of the IDs below the bound.
  bool Contains(uint64_t sign) const { return sign - spec_.first_sign < spec_.num_ids; }
  uint64_t IdOf(uint64_t sign) const { return sign - spec_.first_sign; }
  uint32_t CellOf(uint64_t id) const { return first_cell_ + static_cast<uint32_t>(id); }
  IdState& IdStateOf(uint64_t id) const { return reinterpret_cast<IdState*>(states_.data())[id]; }
  // Of an ID without a row, whose number was written.
  void CountIdState(uint64_t id) { states_.Use(id * sizeof(IdState), sizeof(IdState)); }
  float* values(uint64_t id) const {
    return reinterpret_cast<float*>(values_.data()) + id * stride_;
  }
  // Null where the shape has none.
  uint32_t* scalar(uint64_t id) const {
    return shape_.has_scalar ? reinterpret_cast<uint32_t*>(scalars_.data()) + id : nullptr;
  }

  // The caller writes the row's values.
  void InsertRow(uint64_t id, uint32_t stamp);
  // The cell has zeros again.
  void RemoveRow(uint64_t id);
  uint64_t memory_bytes() const {
    return values_.used_bytes() + scalars_.used_bytes() + states_.used_bytes();
  }

 private:
  const RowArraySpec spec_;
  const RowShape shape_;
  const uint32_t first_cell_;
  const size_t stride_;
  SparsePages values_, scalars_, states_;
};

// Made with the store's config, and shared by the index and the slabs of every shard. Where a sign
// belongs does not change until the store is cleared or configured anew with other shapes.
class RowArrays {
 public:
  // Arrays without rows. kInvalidArgument: more IDs than there are cell numbers.
  // kResourceExhausted: no addresses for them.
  static StatusOr<std::shared_ptr<RowArrays>> Make(std::span<const RowArraySpec> specs,
                                                   const RowPolicies& policies,
                                                   uint32_t tail_floats);

  const std::deque<RowArray>& all() const { return arrays_; }
  // Null: the sign's group has no array, or the ID is not below the bound.
  // A binary search over the arrays, for calls that have a sign and no cell. Lookups of a batch
  // know their group, and do without.
  RowArray* OfSign(uint64_t sign);
  // Cells of arrays are below; all arrays together.
  uint32_t num_cells() const { return num_cells_; }
  // Of a cell below num_cells().
  RowArray& OfCell(uint32_t cell) { return *by_slab_[cell / RowArray::kSlabCells].array; }
  uint64_t IdOfCell(uint32_t cell) const {
    return cell - by_slab_[cell / RowArray::kSlabCells].first_cell;
  }
  RowArray::IdState& IdStateOf(uint32_t cell) { return OfCell(cell).IdStateOf(IdOfCell(cell)); }
  uint64_t memory_bytes() const;

 private:
  struct Slab {
    RowArray* array;
    uint32_t first_cell;
  };
  std::deque<RowArray> arrays_;  // by rising first sign
  std::vector<Slab> by_slab_;
  uint32_t num_cells_ = 0;
};

// Numbers the IDs of a batch that belong to one array, in the order of their first appearance:
// UniqueKeys without a hash table. The array remembers each ID's number, which counts only if the
// ID is that number's ID in this batch. So nothing is cleared between batches.
class ArrayNumbers {
 public:
  void Clear() { count_ = 0; }
  // All IDs are below the array's bound.
  void Insert(RowArray* array, std::span<const uint64_t> ids, uint32_t* numbers);
  // By number.
  std::span<const uint64_t> ids() const { return std::span(ids_).first(count_); }

 private:
  void Reserve(size_t size) {
    if (ids_.size() < size + 1) ids_.resize(std::bit_ceil(size + 1));
  }

  std::vector<uint64_t> ids_;  // a power of two
  size_t count_ = 0;
};

}  // namespace persia::store

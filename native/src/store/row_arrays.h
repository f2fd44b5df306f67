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
// Memory of a place, the row and 8 bytes, is taken by the huge page when a row in it is inserted.
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

class RowArray {
 public:
  static constexpr uint64_t kMaxIds = uint64_t{1} << 31;
  static constexpr uint32_t kSlabCells = 1u << 16;

  // Of one ID.
  struct Place {
    uint32_t number;  // of the ID in the batch that used it last; the top bit: there is a row
    uint32_t stamp;   // of the row
  };
  static constexpr uint32_t kHasRow = 1u << 31;

  // Is empty, and takes no memory, until rows are inserted. data() is null: no memory.
  RowArray(const RowArraySpec& spec, const RowShape& shape, uint32_t first_cell);

  const RowArraySpec& spec() const { return spec_; }
  const RowShape& shape() const { return shape_; }
  bool has_memory() const { return values_.data() != nullptr && places_.data() != nullptr; }
  uint32_t num_slabs() const {
    return static_cast<uint32_t>((spec_.num_ids + kSlabCells - 1) / kSlabCells);
  }
  // Whether the sign is one of the IDs below the bound.
  bool Contains(uint64_t sign) const { return sign - spec_.first_sign < spec_.num_ids; }
  uint64_t IdOf(uint64_t sign) const { return sign - spec_.first_sign; }
  uint32_t CellOf(uint64_t id) const { return first_cell_ + static_cast<uint32_t>(id); }
  Place& PlaceOf(uint64_t id) const { return places()[id]; }
  float* values(uint64_t id) const {
    return reinterpret_cast<float*>(values_.data()) + id * stride_;
  }
  // Null where the shape has none.
  uint32_t* scalar(uint64_t id) const {
    return shape_.has_scalar ? reinterpret_cast<uint32_t*>(scalars_.data()) + id : nullptr;
  }

  // A row begins at the place of the ID, whose values are the caller's to write.
  void Begin(uint64_t id, uint32_t stamp);
  // The row ends: its place has zeros again.
  void End(uint64_t id);
  uint64_t memory_bytes() const { return num_bytes_.load(std::memory_order_relaxed); }

 private:
  Place* places() const { return reinterpret_cast<Place*>(places_.data()); }

  const RowArraySpec spec_;
  const RowShape shape_;
  const uint32_t first_cell_;
  const size_t stride_;
  MappedMemory values_, scalars_, places_;
  std::vector<std::atomic<bool>> used_pages_;  // of values_
  std::atomic<uint64_t> num_bytes_ = 0;
};

class RowArrays {
 public:
  // Arrays without rows. kInvalidArgument: more IDs than there are cell numbers.
  // kResourceExhausted: no addresses for them.
  static StatusOr<std::shared_ptr<RowArrays>> Make(std::span<const RowArraySpec> specs,
                                                   const RowPolicies& policies,
                                                   uint32_t tail_floats);

  const std::deque<RowArray>& all() const { return arrays_; }
  // Null: the sign's group has no array, or the ID is not below the bound.
  RowArray* OfSign(uint64_t sign);
  // Cells of arrays are below; all arrays together.
  uint32_t num_cells() const { return num_cells_; }
  // Of a cell below num_cells().
  RowArray& OfCell(uint32_t cell) { return *by_slab_[cell / RowArray::kSlabCells].array; }
  uint64_t IdOfCell(uint32_t cell) const {
    return cell - by_slab_[cell / RowArray::kSlabCells].first_cell;
  }
  RowArray::Place& PlaceOf(uint32_t cell) { return OfCell(cell).PlaceOf(IdOfCell(cell)); }
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

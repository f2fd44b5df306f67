// RowSlabs: memory for rows, addressed by cell number.
//
// A slab is one block of memory for up to 65,536 rows of one shape: their values [embedding |
// optimizer state], the embedding in the shape's format, then, where the optimizer has one, a
// 32-bit scalar a row (row-wise Adagrad's sum, Adam's step count), which is kept apart so that
// rows keep whole cache lines. A cell is the slab's number above the row's place in it; nothing
// holds a pointer, so slabs could as well be in a mapped file. Only the index knows which sign a
// row belongs to.
//
// A slab begun costs at most 4 bytes for each row there is: slabs of a dim start at 16 KiB and grow
// with its rows up to 2 MiB. (Rows wider than 16 KiB: an eighth of what there is.) SlabMemory cuts
// them from huge pages that shards have in common. Rows freed are reused for the same shape. Memory
// goes back when the store is cleared, or by slabs that leave: whoever knows where the rows are
// moves theirs into free cells of other slabs.
//
// Not thread-safe; several may use the same SlabMemory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "store/row_format.h"
#include "store/slab_memory.h"

namespace persia::store {

class RowArrays;

// What a row consists of; a function of the dim, the optimizer and the store's row format.
struct RowShape {
  uint32_t dim = 0;
  uint32_t state_floats = 0;  // behind the embedding
  bool has_scalar = false;
  uint32_t tail_floats = 0;  // behind the state: the features' own (cold_rows.h, row_features.h)
  RowDtype dtype = RowDtype::kFloat32;  // of the embedding
  uint64_t label = 0;                   // sets shapes apart that are equal otherwise (cold_rows.h)
  // Of memory, that the embedding takes.
  uint32_t embedding_floats() const { return EmbeddingFloats(dtype, dim); }
  // Floats from one row to the next: whole cache lines
  // where that costs at most 16 bytes, else whole 16 bytes. Of dim 0, no more than there are.
  uint32_t Stride() const;
  bool operator==(const RowShape&) const = default;
};

// Where a row's parts are. Valid until the row is freed; valid across allocations.
struct RowView {
  float* values;     // the embedding, in the store's format
  float* state;      // behind it
  uint32_t* scalar;  // null where the shape has none
  uint32_t dim;
};

// Each shard of a store owns one, guarded by the shard's mutex. A rank with consistency="exact"
// owns one for the rows that it holds (client/exact_rows.h). A row keeps its place until it is
// freed, except in slabs that are leaving: their rows are moved by the owner's maintenance, and
// only then.
class RowSlabs {
 public:
  static constexpr uint32_t kNoCell = UINT32_MAX;
  static constexpr uint32_t kNoPool = UINT32_MAX;

  // Both outlive the last call of Allocate(). What has dim 0 lies in `cells`: it stays when rows
  // leave, and would keep their blocks.
  RowSlabs(SlabMemory* memory, SlabMemory* cells) : memory_(memory), cells_(cells) {}
  explicit RowSlabs(SlabMemory* memory) : RowSlabs(memory, memory) {}

  // A pool is the slabs of one shape. Stores have few shapes, and these search them all. FindPool()
  // returns kNoPool where there is none.
  uint32_t FindPool(const RowShape& shape) const;
  uint32_t FindOrAddPool(const RowShape& shape);

  // The cell of a row that belongs into an array; kNoCell: it does not.
  uint32_t AllocateInArray(uint64_t sign, uint32_t dim) const;
  // A row with uninitialised contents; kNoCell when there is no memory or no cell number left.
  [[nodiscard]] uint32_t Allocate(uint32_t pool);
  // The cell is reused for the same shape. Writes into the row's memory.
  void Free(uint32_t cell);
  // Frees all rows and gives their memory back. The first cells become those of `arrays`
  // (row_arrays.h); null: there are none.
  void Clear(std::shared_ptr<RowArrays> arrays = nullptr);

  // Slabs of rows, the newest ones, of about so many bytes are to leave; as many as there is room
  // for their rows in free cells of others. They take no rows any more.
  void BeginLeaving(uint64_t num_bytes);
  // Whether any would; and none has to yet.
  bool CanLeave() const;
  // Whether the row is to be moved: to a cell that Allocate() returns.
  bool IsLeaving(uint32_t cell) const { return holdings_[cell >> kPlaceBits].is_leaving; }
  bool HasLeaving() const;
  // Those of them that have no rows any more go back to the memory.
  void FinishLeaving();

  const RowShape& shape(uint32_t cell) const {
    return pools_[slabs_[cell >> kPlaceBits].pool].shape;
  }
  uint32_t dim(uint32_t cell) const { return slabs_[cell >> kPlaceBits].dim; }
  float* values(uint32_t cell) const {
    const Slab& slab = slabs_[cell >> kPlaceBits];
    return slab.values + size_t{cell & kPlaceMask} * slab.stride;
  }
  // Null where the shape has none.
  uint32_t* scalar(uint32_t cell) const {
    const Slab& slab = slabs_[cell >> kPlaceBits];
    return slab.scalars == nullptr ? nullptr : slab.scalars + (cell & kPlaceMask);
  }
  // Of a row's cell.
  uint64_t row_bytes(uint32_t cell) const {
    const Slab& slab = slabs_[cell >> kPlaceBits];
    return slab.stride * sizeof(float) + (slab.scalars == nullptr ? 0 : sizeof(uint32_t));
  }
  RowView View(uint32_t cell) const {
    float* row = values(cell);
    const Slab& slab = slabs_[cell >> kPlaceBits];
    return {row, row + slab.embedding_floats, scalar(cell), slab.dim};
  }

  uint64_t memory_bytes() const;
  // Of the slabs of rows, without those of dim 0.
  uint64_t row_slab_bytes() const;

 private:
  // A cell in 32 bits keeps an index entry at 16 bytes. 16 bits of place leave 65,535 slabs of up
  // to 65,536 rows.
  static constexpr uint32_t kPlaceBits = 16;
  static constexpr uint32_t kPlaceMask = (1u << kPlaceBits) - 1;

  struct Slab {
    float* values;
    uint32_t* scalars;
    uint32_t stride;
    uint32_t dim;
    uint32_t embedding_floats;
    uint32_t pool;
  };
  struct Pool {
    RowShape shape;
    uint32_t first_free = kNoCell;  // linked through the values of free rows
    uint32_t next_cell = 0;         // of the newest slab, up to end_cell
    uint32_t end_cell = 0;
    uint32_t num_unused() const { return end_cell - next_cell; }
    uint64_t num_rows = 0;          // that there are cells for
    uint64_t num_free = 0;          // in the list
    uint64_t num_bytes = 0;         // of its slabs
    uint32_t num_leaving = 0;       // slabs
    std::vector<uint32_t> slabs{};  // their numbers, the newest last
  };
  // What is beside a slab that finding rows does not need.
  // Apart from Slab, whose 32 bytes every row access reads: two slabs share a cache line.
  struct Holding {
    SlabPiece piece;
    uint32_t num_cells = 0;
    uint32_t num_left = 0;  // rows, while it is leaving
    bool is_leaving = false;
  };

  // False where there is no memory or no number for another slab: a full server continues with the
  // rows that it has.
  bool AddSlab(uint32_t pool);
  uint32_t NewSlabNumber();
  SlabMemory* MemoryOf(const Pool& pool) const { return pool.shape.dim == 0 ? cells_ : memory_; }
  std::vector<uint32_t> FreeCellsOf(const Pool& pool) const;
  bool CanLeave(const Pool& pool) const;
  static bool HasRoomFor(const Holding& holding, const Pool& pool, uint64_t num_free);
  uint64_t BeginLeavingOf(Pool* pool, uint64_t num_bytes);

  SlabMemory* memory_;
  SlabMemory* cells_;
  std::shared_ptr<RowArrays> arrays_;
  uint32_t num_array_cells_ = 0;  // of arrays_
  std::vector<Slab> slabs_;
  std::vector<Holding> holdings_;  // of slabs_, in the same order
  std::vector<uint32_t> vacant_;   // numbers of slabs that have left
  std::vector<Pool> pools_;
  uint64_t slab_bytes_ = 0;
};

}  // namespace persia::store

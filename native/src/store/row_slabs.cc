#include "store/row_slabs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "store/row_arrays.h"

namespace persia::store {
namespace {

// A slab begun is at most this, or 4 bytes for each row of its shape, more than what is needed.
constexpr uint64_t kMinSlabBytes = 16 << 10;
constexpr uint64_t kMaxSlabBytes = SlabMemory::kBlockBytes;
constexpr uint64_t kSlabBytesPerRow = 4;
constexpr uint32_t kKeptFree = 64;  // of that many cells, one
constexpr uint32_t kLineFloats = 16;
constexpr uint32_t kUnitFloats = 4;

uint32_t RoundUp(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit * unit; }

// Slabs of one row each would use up the slab numbers: wide rows get an eighth of what they have.
uint64_t TargetBytes(uint64_t row_bytes, uint64_t num_rows) {
  const bool wide = row_bytes > SlabMemory::kMaxSharedRowBytes;
  const uint64_t target = num_rows * (wide ? row_bytes / 8 : kSlabBytesPerRow);
  return std::clamp(target, kMinSlabBytes, kMaxSlabBytes);
}

}  // namespace

uint32_t RowShape::Stride() const {
  const uint32_t floats = embedding_floats() + state_floats + tail_floats;
  if (dim == 0) return floats;
  // A row that begins a cache line costs a miss less; not at any price.
  const uint32_t lines = RoundUp(floats, kLineFloats);
  return lines - floats <= kUnitFloats ? lines : RoundUp(floats, kUnitFloats);
}

uint32_t RowSlabs::FindPool(const RowShape& shape) const {
  for (uint32_t i = 0; i < pools_.size(); ++i) {
    if (pools_[i].shape == shape) return i;
  }
  return kNoPool;
}

uint32_t RowSlabs::FindOrAddPool(const RowShape& shape) {
  const uint32_t found = FindPool(shape);
  if (found != kNoPool) return found;
  pools_.push_back({.shape = shape});
  return static_cast<uint32_t>(pools_.size() - 1);
}

// Free cells first, the one freed last before the others.
uint32_t RowSlabs::Allocate(uint32_t pool_number) {
  Pool& pool = pools_[pool_number];
  if (pool.first_free != kNoCell) {
    const uint32_t cell = pool.first_free;
    std::memcpy(&pool.first_free, values(cell), sizeof(pool.first_free));
    --pool.num_free;
    return cell;
  }
  if (pool.next_cell == pool.end_cell && !AddSlab(pool_number)) return kNoCell;
  return pool.next_cell++;
}

// The list of free cells is linked through their own memory, so it costs none. The cell freed last
// is used first: it is likely to be in the processor's cache.
void RowSlabs::Free(uint32_t cell) {
  if (cell < num_array_cells_) return arrays_->OfCell(cell).RemoveRow(arrays_->IdOfCell(cell));
  Pool& pool = pools_[slabs_[cell >> kPlaceBits].pool];
  if (pool.num_leaving > 0 && IsLeaving(cell)) {
    // Not into the list of free cells: Allocate() must not hand it out again.
    --holdings_[cell >> kPlaceBits].num_left;
    return;
  }
  std::memcpy(values(cell), &pool.first_free, sizeof(pool.first_free));
  pool.first_free = cell;
  ++pool.num_free;
}

uint64_t RowSlabs::memory_bytes() const {
  return slab_bytes_ + slabs_.capacity() * sizeof(Slab) + holdings_.capacity() * sizeof(Holding) +
         pools_.capacity() * sizeof(Pool);
}

uint64_t RowSlabs::row_slab_bytes() const {
  uint64_t num_bytes = 0;
  for (const Pool& pool : pools_) num_bytes += pool.shape.dim == 0 ? 0 : pool.num_bytes;
  return num_bytes;
}

// Arrays are slabs without memory of their own: what finds a row by its cell need not know of them.
void RowSlabs::Clear(std::shared_ptr<RowArrays> arrays) {
  static_assert(RowArray::kSlabCells == kPlaceMask + 1);
  *this = RowSlabs(memory_, cells_);
  if (arrays == nullptr) return;
  num_array_cells_ = arrays->num_cells();
  for (const RowArray& array : arrays->all()) {
    RowShape shape = array.shape();
    shape.label = pools_.size() + 1;  // rows outside the array do not share its pool
    for (uint32_t i = 0; i < array.num_slabs(); ++i) {
      const uint64_t id = uint64_t{i} << kPlaceBits;
      slabs_.push_back({.values = array.values(id),
                        .scalars = array.scalar(id),
                        .stride = shape.Stride(),
                        .dim = shape.dim,
                        .embedding_floats = shape.embedding_floats(),
                        .pool = static_cast<uint32_t>(pools_.size())});
    }
    pools_.push_back({.shape = shape});
  }
  holdings_.resize(slabs_.size());
  arrays_ = std::move(arrays);
}

uint32_t RowSlabs::AllocateInArray(uint64_t sign, uint32_t dim) const {
  if (num_array_cells_ == 0) return kNoCell;
  const RowArray* array = arrays_->OfSign(sign);
  if (array == nullptr || array->shape().dim != dim) return kNoCell;
  return array->CellOf(array->IdOf(sign));
}

// Numbers of slabs that have left are used again: there are 65,535.
uint32_t RowSlabs::NewSlabNumber() {
  if (vacant_.empty()) {
    slabs_.emplace_back();
    holdings_.emplace_back();
    return static_cast<uint32_t>(slabs_.size() - 1);
  }
  const uint32_t number = vacant_.back();
  vacant_.pop_back();
  return number;
}

// False: no memory, or no number for another slab.
bool RowSlabs::AddSlab(uint32_t pool_number) {
  Pool& pool = pools_[pool_number];
  // The last slab number is left out: with it kNoCell would be a cell.
  if (slabs_.size() >= kPlaceMask && vacant_.empty()) return false;
  const uint64_t stride = pool.shape.Stride();
  const uint64_t scalar_bytes = pool.shape.has_scalar ? sizeof(uint32_t) : 0;
  const uint64_t row_bytes = stride * sizeof(float) + scalar_bytes;
  const uint64_t target = TargetBytes(row_bytes, pool.num_rows);
  SlabPiece piece =
      MemoryOf(pool)->Take(row_bytes, std::clamp<uint64_t>(target / row_bytes, 1, kPlaceMask + 1));
  if (piece.data == nullptr) return false;

  const uint64_t rows = std::min<uint64_t>(piece.size / row_bytes, kPlaceMask + 1);
  auto* values = reinterpret_cast<float*>(piece.data);
  const uint32_t number = NewSlabNumber();
  pool.next_cell = number << kPlaceBits;
  pool.end_cell = pool.next_cell + static_cast<uint32_t>(rows);
  pool.num_rows += rows;
  pool.num_bytes += piece.size;
  pool.slabs.push_back(number);
  slab_bytes_ += piece.size;
  // Behind the values, which begin on a cache line and are whole units of 16 bytes.
  auto* scalars = reinterpret_cast<uint32_t*>(values + rows * stride);
  slabs_[number] = {.values = values,
                    .scalars = pool.shape.has_scalar ? scalars : nullptr,
                    .stride = static_cast<uint32_t>(stride),
                    .dim = pool.shape.dim,
                    .embedding_floats = pool.shape.embedding_floats(),
                    .pool = pool_number};
  holdings_[number] = {.piece = std::move(piece), .num_cells = static_cast<uint32_t>(rows)};
  return true;
}

bool RowSlabs::HasLeaving() const {
  return std::ranges::any_of(pools_, [](const Pool& pool) { return pool.num_leaving > 0; });
}

bool RowSlabs::CanLeave() const {
  return std::ranges::any_of(pools_, [this](const Pool& pool) { return CanLeave(pool); });
}

bool RowSlabs::CanLeave(const Pool& pool) const {
  return pool.shape.dim != 0 && pool.num_leaving == 0 && !pool.slabs.empty() &&
         HasRoomFor(holdings_[pool.slabs.back()], pool, pool.num_free + pool.num_unused());
}

// Where so many cells are free, the slab's own included, as it has, its rows have room elsewhere. A
// few stay free, so that the next rows need no new slab; a last slab without rows may go.
bool RowSlabs::HasRoomFor(const Holding& holding, const Pool& pool, uint64_t num_free) {
  return num_free >= holding.num_cells + (pool.num_rows - holding.num_cells) / kKeptFree;
}

void RowSlabs::BeginLeaving(uint64_t num_bytes) {
  uint64_t num_leaving = 0;
  for (Pool& pool : pools_) {
    if (num_leaving >= num_bytes) return;
    if (CanLeave(pool)) num_leaving += BeginLeavingOf(&pool, num_bytes - num_leaving);
  }
}

// The list of free cells, newest first.
std::vector<uint32_t> RowSlabs::FreeCellsOf(const Pool& pool) const {
  std::vector<uint32_t> cells;
  cells.reserve(pool.num_free);
  for (uint32_t cell = pool.first_free; cell != kNoCell;) {
    cells.push_back(cell);
    std::memcpy(&cell, values(cell), sizeof(cell));
  }
  return cells;
}

// The newest slabs, which are the largest. Free cells of slabs that leave are taken out of the
// list; the order of the others stays, so that the next rows get the same cells as without.
uint64_t RowSlabs::BeginLeavingOf(Pool* pool, uint64_t num_bytes) {
  uint64_t num_free = pool->num_free + pool->num_unused();
  const std::vector<uint32_t> free_cells = FreeCellsOf(*pool);
  // Counted once: asking for each slab would walk through the list as often.
  std::vector<uint32_t> free_of_slab(slabs_.size());
  for (const uint32_t cell : free_cells) ++free_of_slab[cell >> kPlaceBits];
  free_of_slab[pool->slabs.back()] += pool->num_unused();
  pool->next_cell = pool->end_cell = 0;
  uint64_t num_leaving_bytes = 0;
  for (auto it = pool->slabs.rbegin(); it != pool->slabs.rend(); ++it) {
    Holding& holding = holdings_[*it];
    if (num_leaving_bytes >= num_bytes || !HasRoomFor(holding, *pool, num_free)) break;
    num_free -= holding.num_cells;
    num_leaving_bytes += holding.piece.size;
    holding.is_leaving = true;
    holding.num_left = holding.num_cells - free_of_slab[*it];
    ++pool->num_leaving;
  }
  pool->first_free = kNoCell;
  pool->num_free = 0;
  for (auto cell = free_cells.rbegin(); cell != free_cells.rend(); ++cell) {
    if (!IsLeaving(*cell)) Free(*cell);
  }
  return num_leaving_bytes;
}

// A slab that still has rows, because there was no memory to move them, leaves later.
void RowSlabs::FinishLeaving() {
  for (Pool& pool : pools_) {
    if (pool.num_leaving == 0) continue;
    std::erase_if(pool.slabs, [&](uint32_t number) {
      Holding& holding = holdings_[number];
      if (!holding.is_leaving || holding.num_left > 0) return false;
      pool.num_rows -= holding.num_cells;
      pool.num_bytes -= holding.piece.size;
      slab_bytes_ -= holding.piece.size;
      --pool.num_leaving;
      MemoryOf(pool)->Give(std::move(holding.piece));
      holding = {};
      slabs_[number] = {};
      vacant_.push_back(number);
      return true;
    });
  }
}

}  // namespace persia::store

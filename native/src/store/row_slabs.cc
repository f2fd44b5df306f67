#include "store/row_slabs.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace persia::store {
namespace {

constexpr uint64_t kMinSlabBytes = 16 << 10;
constexpr uint64_t kMaxSlabBytes = SlabMemory::kBlockBytes;
constexpr uint64_t kSlabBytesPerRow = 4;
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

uint32_t RowSlabs::Allocate(uint32_t pool_number) {
  Pool& pool = pools_[pool_number];
  if (pool.first_free != kNoSlot) {
    const uint32_t slot = pool.first_free;
    std::memcpy(&pool.first_free, values(slot), sizeof(pool.first_free));
    return slot;
  }
  if (pool.next_slot == pool.end_slot && !AddSlab(pool_number)) return kNoSlot;
  return pool.next_slot++;
}

void RowSlabs::Free(uint32_t slot) {
  Pool& pool = pools_[slabs_[slot >> kPlaceBits].pool];
  std::memcpy(values(slot), &pool.first_free, sizeof(pool.first_free));
  pool.first_free = slot;
}

uint64_t RowSlabs::memory_bytes() const {
  return slab_bytes_ + slabs_.capacity() * sizeof(Slab) + blocks_.capacity() * sizeof(blocks_[0]) +
         pools_.capacity() * sizeof(Pool);
}

void RowSlabs::Clear() { *this = RowSlabs(memory_); }

bool RowSlabs::AddSlab(uint32_t pool_number) {
  Pool& pool = pools_[pool_number];
  // The last slab number is left out: with it kNoSlot would be a slot.
  if (slabs_.size() >= kPlaceMask) return false;
  const uint64_t stride = pool.shape.Stride();
  const uint64_t scalar_bytes = pool.shape.has_scalar ? sizeof(uint32_t) : 0;
  const uint64_t row_bytes = stride * sizeof(float) + scalar_bytes;
  const uint64_t target = TargetBytes(row_bytes, pool.num_rows);
  SlabPiece piece =
      memory_->Take(row_bytes, std::clamp<uint64_t>(target / row_bytes, 1, kPlaceMask + 1));
  if (piece.data == nullptr) return false;

  const uint64_t rows = std::min<uint64_t>(piece.size / row_bytes, kPlaceMask + 1);
  auto* values = reinterpret_cast<float*>(piece.data);
  pool.next_slot = static_cast<uint32_t>(slabs_.size() << kPlaceBits);
  pool.end_slot = pool.next_slot + static_cast<uint32_t>(rows);
  pool.num_rows += rows;
  slab_bytes_ += piece.size;
  auto* scalars = reinterpret_cast<uint32_t*>(values + rows * stride);
  slabs_.push_back({.values = values,
                    .scalars = pool.shape.has_scalar ? scalars : nullptr,
                    .stride = static_cast<uint32_t>(stride),
                    .dim = pool.shape.dim,
                    .embedding_floats = pool.shape.embedding_floats(),
                    .pool = pool_number});
  blocks_.push_back(std::move(piece.block));
  return true;
}

}  // namespace persia::store

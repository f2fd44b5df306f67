#include "pool/cell_allocator.h"

#include "pool/pool_header.h"

namespace persia::pool {

uint64_t FirstCell(uint64_t extent) { return extent + ExtentHeader::kBytes; }

uint64_t CellsEnd(uint64_t extent, uint64_t extent_bytes, uint32_t cell_bytes) {
  const uint64_t first = FirstCell(extent);
  return first + (extent + extent_bytes - first) / cell_bytes * cell_bytes;
}

// Freed cells before fresh ones: pages that were used are more likely to be in memory.
std::optional<uint64_t> CellAllocator::Take(uint32_t cell_bytes) {
  SizeClass& size = classes_[cell_bytes];
  uint64_t address;
  if (!size.free.empty()) {
    address = size.free.back();
    size.free.pop_back();
  } else if (size.fresh < size.fresh_end) {
    address = size.fresh;
    size.fresh += cell_bytes;
  } else {
    return std::nullopt;
  }
  used_bytes_ += cell_bytes;
  return address;
}

void CellAllocator::Free(uint64_t address) {
  const uint32_t bytes = cell_bytes(address);
  classes_[bytes].free.push_back(address);
  used_bytes_ -= bytes;
}

// Used when the pool grows: the extent gets its size of cells when one is asked for (Assign).
void CellAllocator::AddExtent() {
  unassigned_.push_back(end_of_extents());
  cell_bytes_.push_back(0);
}

// Used by recovery, which has read which cells of the extent have a row. Which cells are free is in
// memory alone: it follows from the rows, and need not survive a crash.
void CellAllocator::AddExtent(uint32_t cell_bytes, const std::vector<uint64_t>& free) {
  const uint64_t extent = end_of_extents();
  cell_bytes_.push_back(cell_bytes);
  std::vector<uint64_t>& all = classes_[cell_bytes].free;
  all.insert(all.end(), free.begin(), free.end());
  const uint64_t bytes = CellsEnd(extent, extent_bytes_, cell_bytes) - FirstCell(extent);
  used_bytes_ += bytes - free.size() * cell_bytes;
}

// Extents stay in the file and get a size again when one is needed.
void CellAllocator::ForgetAll() {
  const uint64_t count = num_extents();
  cell_bytes_.clear();
  unassigned_.clear();
  classes_.clear();
  used_bytes_ = 0;
  for (uint64_t i = 0; i < count; ++i) AddExtent();
}

uint64_t CellAllocator::memory_bytes() const {
  uint64_t num_addresses = unassigned_.capacity();
  for (const auto& [_, size] : classes_) num_addresses += size.free.capacity();
  return num_addresses * sizeof(uint64_t) + cell_bytes_.capacity() * sizeof(uint32_t);
}

// What was fresh in the size's former extent has been taken, or this would not have been asked for.
std::optional<uint64_t> CellAllocator::Assign(uint32_t cell_bytes) {
  if (unassigned_.empty()) return std::nullopt;
  const uint64_t extent = unassigned_.back();
  unassigned_.pop_back();
  cell_bytes_[(extent - first_extent_) / extent_bytes_] = cell_bytes;
  SizeClass& size = classes_[cell_bytes];
  size.fresh = FirstCell(extent);
  size.fresh_end = CellsEnd(extent, extent_bytes_, cell_bytes);
  return extent;
}

}  // namespace persia::pool

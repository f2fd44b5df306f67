// CellAllocator: which cells of a pool are free, by their size.
//
// Kept in memory only: recovery finds out anew which cells hold a row, so a cell cannot be lost to
// a crash between being taken and being used. An extent belongs to one size of cells for good.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace persia::pool {

class CellAllocator {
 public:
  CellAllocator(uint64_t first_extent, uint64_t extent_bytes)
      : first_extent_(first_extent), extent_bytes_(extent_bytes) {}

  // Nothing: Assign() an extent.
  std::optional<uint64_t> Take(uint32_t cell_bytes);
  void Free(uint64_t address);

  // The next extent, which no size has yet.
  void AddExtent();
  // Adds the next extent, whose cells are of `cell_bytes`; `free` are those without a row.
  void AddExtent(uint32_t cell_bytes, const std::vector<uint64_t>& free);
  // After Take() found nothing: gives it an extent that no size has. Its offset, or nothing.
  std::optional<uint64_t> Assign(uint32_t cell_bytes);

  // No extent has a size any more.
  void ForgetAll();

  uint64_t num_extents() const { return cell_bytes_.size(); }
  uint64_t end_of_extents() const { return first_extent_ + num_extents() * extent_bytes_; }
  uint32_t cell_bytes(uint64_t address) const {
    return cell_bytes_[(address - first_extent_) / extent_bytes_];
  }
  // Bytes of the cells in use.
  uint64_t used_bytes() const { return used_bytes_; }
  // Of what is kept here.
  uint64_t memory_bytes() const;

 private:
  struct SizeClass {
    std::vector<uint64_t> free;
    uint64_t fresh = 0;  // the next cell of the newest extent, up to the end
    uint64_t fresh_end = 0;
  };

  const uint64_t first_extent_;
  const uint64_t extent_bytes_;
  std::vector<uint32_t> cell_bytes_;  // by extent
  std::vector<uint64_t> unassigned_;  // offsets
  std::unordered_map<uint32_t, SizeClass> classes_;
  uint64_t used_bytes_ = 0;
};

// Where the cells of an extent lie.
uint64_t FirstCell(uint64_t extent);
uint64_t CellsEnd(uint64_t extent, uint64_t extent_bytes, uint32_t cell_bytes);

}  // namespace persia::pool

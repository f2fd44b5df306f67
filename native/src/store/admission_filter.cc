#include "store/admission_filter.h"

#include <algorithm>
#include <array>

namespace persia::store {

void AdmissionFilter::Resize(uint64_t num_cells) {
  if (num_cells == cells_.size()) return;
  cells_ = std::vector<uint8_t>(num_cells, 0);
  num_used_ = 0;
}

void AdmissionFilter::Clear() {
  std::fill(cells_.begin(), cells_.end(), uint8_t{0});
  num_used_ = 0;
}

uint32_t AdmissionFilter::Count(uint64_t key) {
  if (num_used_ > cells_.size() / 3) Halve();
  // The key is a mixed sign; its bits are mixed once more, as some of them chose the shard.
  const uint64_t mixed = key * 0x9e3779b97f4a7c15u;
  const uint64_t start = mixed >> 32, step = mixed | 1;
  const uint64_t mask = cells_.size() - 1;
  std::array<uint8_t*, 3> cells;
  uint8_t least = UINT8_MAX;
  for (uint64_t i = 0; i < cells.size(); ++i) {
    cells[i] = &cells_[(start + i * step) & mask];
    least = std::min(least, *cells[i]);
  }
  if (least == UINT8_MAX) return least;
  // Only the least ones grow: the others already hold counts of other signs too.
  for (uint8_t* cell : cells) {
    if (*cell != least) continue;
    num_used_ += *cell == 0 ? 1 : 0;
    *cell = static_cast<uint8_t>(least + 1);
  }
  return least + 1u;
}

// A pass over all cells, once for as many new signs as a third of the cells: amortised, some bytes
// a sign.
void AdmissionFilter::Halve() {
  num_used_ = 0;
  for (uint8_t& cell : cells_) {
    cell /= 2;
    num_used_ += cell == 0 ? 0 : 1;
  }
}

}  // namespace persia::store

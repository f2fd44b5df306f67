// AdmissionFilter: how many training batches had a sign that has no row yet.
//
// A counting Bloom filter: each sign has three of the cells, and its count is the least of them. So
// it is never counted too low, and too high only where other signs have all of its cells; memory is
// what Resize() gave, whatever is counted. When a third of the cells are in use all counts are
// halved: signs that are seen once and never again do not fill the filter up, and a sign that comes
// less often than the filter fills may have to start again.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace persia::store {

class AdmissionFilter {
 public:
  // Forgets everything where the number changes; 0 gives the memory back. Else a power of 2.
  void Resize(uint64_t num_cells);
  void Clear();

  // Counts the key once more, up to 255, and returns the count.
  uint32_t Count(uint64_t key);

  uint64_t memory_bytes() const { return cells_.capacity(); }

 private:
  void Halve();

  std::vector<uint8_t> cells_;
  uint64_t num_used_ = 0;  // cells that are not 0
};

}  // namespace persia::store

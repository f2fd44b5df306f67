#include "store/cold_rows.h"

namespace persia::store {

void ColdReads::Add(uint64_t key, const ColdRow& cold, uint32_t mark) {
  const size_t num_floats = size_t{cold.dim} + cold.state_floats;
  reads_.push_back({.address = cold.address, .sign = SignOfKey(key)});
  added_.push_back({key, num_floats, mark});
  num_floats_ += num_floats;
}

// Only now is it known how large the buffer is that the rows share.
void ColdReads::ReadFrom(const pool::RowPool& pool) {
  values_.resize(num_floats_);
  std::span<float> left(values_);
  for (size_t i = 0; i < reads_.size(); ++i) {
    reads_[i].values = left.first(added_[i].num_floats);
    left = left.subspan(added_[i].num_floats);
  }
  pool.ReadMany(reads_);
}

const pool::RowRead* ColdReads::Find(uint64_t key, const RowMarks* marks) {
  if (next_ == reads_.size() || added_[next_].key != key) return nullptr;
  const size_t i = next_++;
  return reads_[i].is_found && added_[i].mark == marks->Of(key) ? &reads_[i] : nullptr;
}

}  // namespace persia::store

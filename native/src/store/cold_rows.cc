#include "store/cold_rows.h"

namespace persia::store {

void ColdReads::Add(uint64_t key, const ColdCell& cell, uint32_t mark) {
  const size_t num_floats = size_t{cell.dim} + cell.state_floats;
  rows_.push_back({.row = {.key = key,
                           .address = cell.address,
                           .mark = mark,
                           .is_found = false,
                           .head = {},
                           .values = {}},
                   .num_floats = num_floats});
  num_floats_ += num_floats;
}

void ColdReads::ReadFrom(const pool::RowPool& pool) {
  values_.resize(num_floats_);
  reads_.clear();
  std::span<float> left(values_);
  for (Added& added : rows_) {
    const auto values = left.first(added.num_floats);
    left = left.subspan(added.num_floats);
    added.row.values = values;
    reads_.push_back({added.row.address, SignOfKey(added.row.key), values});
  }
  pool.ReadMany(reads_);
  for (size_t i = 0; i < rows_.size(); ++i) {
    rows_[i].row.head = reads_[i].head;
    rows_[i].row.is_found = reads_[i].is_found;
  }
}

const ColdReads::Row* ColdReads::Find(uint64_t key) {
  if (next_ == rows_.size() || rows_[next_].row.key != key) return nullptr;
  const Row& row = rows_[next_++].row;
  return row.is_found ? &row : nullptr;
}

}  // namespace persia::store

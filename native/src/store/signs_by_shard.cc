#include "store/signs_by_shard.h"

#include <algorithm>
#include <array>
#include <limits>

#include "simd/kernels.h"
#include "store/sign_index.h"

namespace persia::store {

Status SignsByShard::AddBlocks(std::span<const RowBlock> blocks) {
  blocks_.clear();
  uint64_t rows = 0, floats = 0;
  for (const RowBlock& block : blocks) {
    if (block.dim == 0 || block.dim > kMaxDim) {
      return InvalidArgument("dim is ", block.dim, "; give one from 1 to ", kMaxDim);
    }
    blocks_.push_back({.first_row = rows, .first_float = floats, .dim = block.dim});
    rows += block.signs.size();
    floats += block.signs.size() * block.dim;
    if (rows > std::numeric_limits<uint32_t>::max()) {
      return InvalidArgument("the request has ", rows, " rows; send fewer than 2^32 at once");
    }
  }
  // Growing would copy what is old, and take up to twice the memory.
  if (rows > keys_.capacity()) keys_ = {};
  if (rows > refs_.capacity()) refs_ = {};
  keys_.resize(rows);
  refs_.resize(rows);
  return Status::Ok();
}

// A counting sort by shard, which keeps the order of the call.
Status SignsByShard::Build(std::span<const RowBlock> blocks, uint32_t num_shards) {
  PERSIA_RETURN_IF_ERROR(AddBlocks(blocks));
  // SignKey() is computed once for each row, and kept for the second pass.
  // Counted two places ahead: after the sums, ends_[s + 1] is where shard s begins, and scattering
  // its rows moves it to where shard s ends.
  ends_.assign(num_shards + 2, 0);
  uint32_t row = 0;
  for (const RowBlock& block : blocks) {
    for (const uint64_t sign : block.signs) {
      const uint64_t key = SignKey(sign);
      keys_[row++] = key;
      ++ends_[ShardOfKey(key, num_shards) + 2];
    }
  }
  for (uint32_t s = 2; s < ends_.size(); ++s) ends_[s] += ends_[s - 1];
  for (row = 0; row < keys_.size(); ++row) {
    const uint64_t key = keys_[row];
    refs_[ends_[ShardOfKey(key, num_shards) + 1]++] = {.key = key, .row = row};
  }
  return Status::Ok();
}

bool SignsByShard::AreOf(std::span<const RowBlock> blocks) const {
  constexpr size_t kChunk = 256;
  if (blocks.size() != blocks_.size()) return false;
  size_t row = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const auto signs = blocks[b].signs;
    if (blocks[b].dim != blocks_[b].dim || row != blocks_[b].first_row) return false;
    if (signs.size() > keys_.size() - row) return false;
    for (size_t i = 0; i < signs.size(); i += kChunk) {
      std::array<uint64_t, kChunk> keys;
      const size_t size = std::min(kChunk, signs.size() - i);
      simd::ActiveKernels().make_keys(keys.data(), signs.data() + i, size);
      if (!std::equal(keys.begin(), keys.begin() + size, keys_.begin() + row + i)) return false;
    }
    row += signs.size();
  }
  return row == keys_.size();
}

std::span<const Run> SignsByShard::RunsOf(uint32_t shard) {
  runs_.clear();
  auto refs = std::span<const RowRef>(refs_).subspan(ends_[shard], ends_[shard + 1] - ends_[shard]);
  while (!refs.empty()) {
    // The last block that begins at or before the row: empty ones before it begin at the same row.
    const auto next =
        std::upper_bound(blocks_.begin(), blocks_.end(), refs.front().row,
                         [](uint64_t row, const Block& block) { return row < block.first_row; });
    const uint64_t end_row = next == blocks_.end() ? keys_.size() : next->first_row;
    const auto end = std::partition_point(
        refs.begin(), refs.end(), [end_row](const RowRef& ref) { return ref.row < end_row; });
    const auto count = static_cast<size_t>(end - refs.begin());
    const Block& block = *(next - 1);
    runs_.push_back({.dim = block.dim,
                     .first_row = block.first_row,
                     .first_float = block.first_float,
                     .refs = refs.first(count)});
    refs = refs.subspan(count);
  }
  return runs_;
}

}  // namespace persia::store

// One block of a checkpoint file: rows of one virtual shard, dim and optimizer; or the signs of
// rows that are gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "base/train_config.h"

namespace persia::checkpoint {

enum class BlockKind : uint8_t { kRows = 0, kRemovals = 1 };

// What the rows of a block have in common.
struct BlockShape {
  BlockKind kind = BlockKind::kRows;
  OptimizerKind optimizer = OptimizerKind::kSgd;
  uint32_t virtual_shard = 0;
  uint32_t dim = 0;
  uint32_t state_floats = 0;
  bool has_scalar = false;

  size_t row_floats() const { return size_t{dim} + state_floats; }
  auto operator<=>(const BlockShape&) const = default;
};

// The columns of a block. `values` has the embeddings, then the state: [num_rows, dim] and
// [num_rows, state_floats].
struct BlockRows {
  BlockShape shape;
  std::vector<uint64_t> signs;
  std::vector<uint32_t> ages;     // none where the block has removals
  std::vector<uint32_t> scalars;  // none where the optimizer has none
  std::vector<float> values;

  const float* embeddings() const { return values.data(); }
  const float* state() const { return values.data() + signs.size() * shape.dim; }
};

// Keeps what compression needs from block to block. Not thread-safe.
class BlockEncoder {
 public:
  // Appends the block's bytes, a multiple of 8 of them, to *out.
  Status Encode(const BlockRows& rows, std::vector<std::byte>* out);

 private:
  struct Compressor;
  struct Free {
    void operator()(Compressor* compressor) const;
  };
  std::unique_ptr<Compressor, Free> compressor_;
  std::vector<std::byte> columns_;
};

// Walks through a chunk of whole blocks. Not thread-safe.
class BlockDecoder {
 public:
  // `chunk` starts at a multiple of 8.
  explicit BlockDecoder(std::span<const std::byte> chunk) : rest_(chunk) {}

  bool AtEnd() const { return rest_.empty(); }
  // kCorruption names what is wrong with the next block: bounds, checksum, version, lengths, signs
  // of another virtual shard.
  Status Next(BlockRows* rows);

 private:
  std::span<const std::byte> rest_;
  std::vector<std::byte> columns_;
  uint64_t number_ = 0;
};

// The checksum that an encoded block carries.
uint64_t ChecksumOfBlock(std::span<const std::byte> block);

}  // namespace persia::checkpoint

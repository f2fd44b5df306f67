// One block of a checkpoint file: rows of one virtual shard, dim and optimizer; or the signs of
// rows that are gone. The bytes are described in docs/checkpoint_format.md.
//
// A block stands for itself: it has its own shape, checksum and version, so that blocks can be read
// in any order, by several threads, and by a server that needs some of the virtual shards. Columns
// (signs, ages, scalars, floats by planes of bytes) are compressed together by zstd.
//
// Damaged bytes never make a decoder read beyond them or ask for more than 64 MiB: it says
// kCorruption and what is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "base/train_config.h"

struct ZSTD_CCtx_s;  // so that files which include this need not find the library

namespace persia::checkpoint {

enum class BlockKind : uint8_t { kRows = 0, kRemovals = 1 };

// What the rows of a block have in common. A block of removals has a dim of 0 and no state.
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

// The columns of a block, each with one element for each row. `values` has the embeddings, then the
// state: [num_rows, dim] and [num_rows, state_floats]. All float32: files know no other format.
struct BlockRows {
  BlockShape shape;
  std::vector<uint64_t> signs;
  std::vector<uint32_t> ages;     // none where the block has removals
  std::vector<uint32_t> scalars;  // none where the optimizer has none
  std::vector<float> values;

  const float* embeddings() const { return values.data(); }
  const float* state() const { return values.data() + signs.size() * shape.dim; }
};

// Keeps what compression needs from block to block, as making it is not cheap. Not thread-safe.
// Private to the thread that writes: each BlockWriter has one.
class BlockEncoder {
 public:
  // Appends the block's bytes, a multiple of 8 of them, to *out. The rows are of one virtual shard,
  // which is not checked here. kResourceExhausted: no memory.
  Status Encode(const BlockRows& rows, std::vector<std::byte>* out);

 private:
  struct Free {
    void operator()(ZSTD_CCtx_s* context) const;
  };
  std::unique_ptr<ZSTD_CCtx_s, Free> context_;
  std::vector<std::byte> columns_;
};

// Walks through a chunk of whole blocks. Not thread-safe: threads decode chunks of their own.
class BlockDecoder {
 public:
  // `chunk` starts at a multiple of 8, and outlives the decoder.
  // Nothing is copied of the chunk but the columns of the block that is decoded.
  explicit BlockDecoder(std::span<const std::byte> chunk) : rest_(chunk) {}

  // Ask before each Next(): there is no block of no rows that would mark the end.
  bool AtEnd() const { return rest_.empty(); }
  // Decodes the next block in place of what *rows has, whose memory is used again. kCorruption
  // names what is wrong: bounds, checksum, version, lengths, signs of another virtual shard. After
  // an error the decoder must not be used again.
  Status Next(BlockRows* rows);

 private:
  std::span<const std::byte> rest_;
  std::vector<std::byte> columns_;
  uint64_t number_ = 0;
};

// The checksum that an encoded block carries, not computed anew: the footer repeats it.
uint64_t ChecksumOfBlock(std::span<const std::byte> block);

}  // namespace persia::checkpoint

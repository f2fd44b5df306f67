// BlockWriter: gathers rows, which come in any order, by virtual shard and dim, and writes a block
// whenever enough of a kind are together.
//
// Why rows are gathered: they are read in the order of hashes, and a reader wants the rows of some
// virtual shards without the others. Blocks of one row each would compress badly and cost a header
// a row.
//
// Memory: the records of unfinished blocks, bounded by `max_gathered_bytes`. If there is less of it
// than all virtual shards need, blocks become smaller, and nothing else changes. SnapshotPart
// writes files with it; RowCopy (standbys) and RowTransfer (resizing) send its blocks.
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/hash.h"
#include "base/status.h"
#include "base/train_config.h"
#include "checkpoint/block.h"
#include "checkpoint/file_format.h"
#include "store/row_records.h"

namespace persia::checkpoint {

class BlockWriter {
 public:
  // Rows of about so many bytes make a block.
  // Large enough for zstd to find repetitions, small enough that 4,096 of them in the making fit
  // into the default of Snapshot::Options.
  static constexpr size_t kBlockBytes = 60 << 10;

  // Blocks are appended to *out; the first one has `offset` in the file. Beyond
  // `max_gathered_bytes`, blocks are written before they are full. Without `with_state` rows are
  // written without the optimizer's state and scalar.
  BlockWriter(TrainConfig config, bool with_state, size_t max_gathered_bytes, uint64_t offset,
              std::vector<std::byte>* out);

  // A row of dim 0 is the removal of its sign.
  Status Add(const store::RowHead& head, const float* values);
  // Writes some of what is still gathered, in the order of virtual shards; false when nothing is.
  // One virtual shard at a time, so that a throttled writer can sleep between two calls. After the
  // last Add() call it until it returns false: what it has not written is in no block.
  StatusOr<bool> FlushSome();

  // The list that becomes the file's footer. Offsets count from the start of the file, not of *out,
  // which the caller empties in between.
  const std::vector<BlockEntry>& blocks() const { return blocks_; }
  uint64_t num_rows() const { return num_rows_; }  // in blocks()
  uint64_t offset() const { return offset_; }      // of what comes next

 private:
  // Rows of one dim and optimizer, by virtual shard.
  struct Group {
    BlockShape shape;
    std::vector<store::RowRecords> rows{kNumVirtualShards};
  };

  Group& GroupOf(const store::RowHead& head);
  Status MakeRoom();
  Status Write(Group* group, uint32_t virtual_shard);

  const TrainConfig config_;
  const bool with_state_;
  const size_t max_gathered_bytes_;
  std::vector<std::byte>* out_;
  std::vector<std::unique_ptr<Group>> groups_;
  size_t gathered_bytes_ = 0;
  // Where the last round ended: beginning at 0 each time would write the first virtual shards in
  // small blocks and leave the last ones gathered.
  uint32_t next_to_write_ = 0;  // virtual shard
  uint64_t offset_;
  uint64_t num_rows_ = 0;
  std::vector<BlockEntry> blocks_;
  BlockRows columns_;
  BlockEncoder encoder_;
};

}  // namespace persia::checkpoint

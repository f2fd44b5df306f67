#include "checkpoint/block_writer.h"

#include <algorithm>
#include <span>
#include <utility>

namespace persia::checkpoint {

using store::RowHead;
using store::RowRecords;

BlockWriter::BlockWriter(TrainConfig config, bool with_state, size_t max_gathered_bytes,
                         uint64_t offset, std::vector<std::byte>* out)
    : config_(std::move(config)),
      with_state_(with_state),
      max_gathered_bytes_(max_gathered_bytes),
      out_(out),
      offset_(offset) {}

// Rows stay gathered as records: most blocks are written long after their first row came.
Status BlockWriter::Add(const RowHead& head, const float* values) {
  Group& group = GroupOf(head);
  const uint32_t virtual_shard = VirtualShard(SignHash(head.sign));
  RowRecords& rows = group.rows[virtual_shard];
  const size_t bytes = head.record_bytes();
  if (rows.num_bytes() > 0 && rows.num_bytes() + bytes > kBlockBytes) {
    PERSIA_RETURN_IF_ERROR(Write(&group, virtual_shard));
  }
  if (!rows.HasRoom(bytes)) {
    // Never so much that the system is asked for it: these come and go.
    const size_t wanted = rows.num_bytes() + bytes;
    rows.Reserve(std::max(wanted, std::min(2 * wanted, kBlockBytes)));
  }
  if (head.dim == 0) {
    rows.AddRemoval(head.sign);
  } else {
    rows.Add(head, values);
  }
  gathered_bytes_ += bytes;
  return gathered_bytes_ > max_gathered_bytes_ ? MakeRoom() : Status::Ok();
}

// A linear search: stores have few dims and optimizers. The first rows that come tell the others'
// shape.
BlockWriter::Group& BlockWriter::GroupOf(const RowHead& head) {
  const OptimizerKind optimizer = config_.OfSign(head.sign).optimizer.kind;
  const uint32_t state_floats = with_state_ ? head.state_floats : 0;
  for (const auto& group : groups_) {
    const BlockShape& shape = group->shape;
    if (shape.dim == head.dim && shape.state_floats == state_floats &&
        shape.optimizer == optimizer) {
      return *group;
    }
  }
  groups_.push_back(std::make_unique<Group>());
  BlockShape& shape = groups_.back()->shape;
  shape.kind = head.dim == 0 ? BlockKind::kRemovals : BlockKind::kRows;
  shape.optimizer = optimizer;
  shape.dim = head.dim;
  shape.state_floats = state_floats;
  shape.has_scalar = with_state_ && head.has_scalar != 0;
  return *groups_.back();
}

// Goes around the virtual shards and writes those that have as much as others or more.
Status BlockWriter::MakeRoom() {
  const size_t average = gathered_bytes_ / (groups_.size() * kNumVirtualShards);
  while (gathered_bytes_ > max_gathered_bytes_) {
    for (const auto& group : groups_) {
      const RowRecords& rows = group->rows[next_to_write_];
      if (rows.num_rows() == 0 || rows.num_bytes() < average) continue;
      PERSIA_RETURN_IF_ERROR(Write(group.get(), next_to_write_));
    }
    next_to_write_ = (next_to_write_ + 1) % kNumVirtualShards;
  }
  return Status::Ok();
}

// One virtual shard a call, so that the caller can sleep in between.
StatusOr<bool> BlockWriter::FlushSome() {
  if (gathered_bytes_ == 0) return false;
  for (const auto& group : groups_) {
    if (group->rows[next_to_write_].num_rows() == 0) continue;
    PERSIA_RETURN_IF_ERROR(Write(group.get(), next_to_write_));
  }
  next_to_write_ = (next_to_write_ + 1) % kNumVirtualShards;
  return true;
}

Status BlockWriter::Write(Group* group, uint32_t virtual_shard) {
  // Its memory goes: most of the virtual shards have none most of the time.
  const RowRecords rows = std::exchange(group->rows[virtual_shard], RowRecords());
  gathered_bytes_ -= rows.num_bytes();
  BlockShape& shape = columns_.shape = group->shape;
  shape.virtual_shard = virtual_shard;
  columns_.signs.clear();
  columns_.ages.clear();
  columns_.scalars.clear();
  columns_.values.resize(rows.num_rows() * shape.row_floats());
  float* embedding = columns_.values.data();
  float* state = embedding + rows.num_rows() * shape.dim;
  rows.ForEach([&](const RowHead& head, const float* values) {
    columns_.signs.push_back(head.sign);
    if (shape.kind == BlockKind::kRows) columns_.ages.push_back(head.age);
    if (shape.has_scalar) columns_.scalars.push_back(head.scalar);
    embedding = std::copy_n(values, shape.dim, embedding);
    state = std::copy_n(values + shape.dim, shape.state_floats, state);
  });
  const size_t begin = out_->size();
  PERSIA_RETURN_IF_ERROR(encoder_.Encode(columns_, out_));
  const auto block = std::span(*out_).subspan(begin);
  blocks_.push_back({.virtual_shard = virtual_shard,
                     .num_rows = static_cast<uint32_t>(rows.num_rows()),
                     .offset = offset_,
                     .length = block.size(),
                     .checksum = ChecksumOfBlock(block)});
  offset_ += block.size();
  num_rows_ += rows.num_rows();
  return Status::Ok();
}

}  // namespace persia::checkpoint

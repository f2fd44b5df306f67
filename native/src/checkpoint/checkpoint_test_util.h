// Whole checkpoint files in memory, and what is in them, for the tests of this layer.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/block.h"
#include "checkpoint/file_format.h"
#include "checkpoint/snapshot.h"
#include "store/store_test_util.h"

namespace persia::checkpoint {

using Bytes = std::vector<std::byte>;

// Everything that a checkpoint keeps of a row.
struct Row {
  uint32_t dim = 0;
  uint32_t age = 0;
  uint32_t scalar = 0;
  std::vector<float> values;  // embedding, then state
  bool operator==(const Row&) const = default;
};
using Rows = std::map<uint64_t, Row>;

inline TrainConfig ConfigOf(OptimizerKind kind, float lr = 0.1f) {
  TrainConfig config;
  config.optimizer.kind = kind;
  config.optimizer.lr = lr;
  if (kind == OptimizerKind::kFtrl) config.optimizer.beta = 1.0f;
  return config;
}

inline Status ReadAll(SnapshotPart& part, Bytes* file, size_t max_bytes = 10'000) {
  while (true) {
    const size_t before = file->size();
    PERSIA_RETURN_IF_ERROR(part.Read(max_bytes, [&](size_t count) {
      file->resize(before + count);
      return file->data() + before;
    }));
    if (file->size() == before) return Status::Ok();
  }
}

inline std::span<const std::byte> FooterOf(const Bytes& file) {
  const Bytes trailer(file.end() - kTrailerBytes, file.end());
  const auto place = DecodeTrailer(trailer);
  EXPECT_TRUE(place.ok()) << place.status().ToString();
  return std::span(file).subspan(place.value().offset, place.value().length);
}

// The bytes of all blocks.
inline std::span<const std::byte> BlocksOf(const Bytes& file) {
  auto blocks = DecodeFooter(FooterOf(file));
  EXPECT_TRUE(blocks.ok()) << blocks.status().ToString();
  if (blocks->empty()) return {};
  const BlockEntry& first = blocks->front();
  const BlockEntry& last = blocks->back();
  return std::span(file).subspan(first.offset, last.offset + last.length - first.offset);
}

inline void AddRows(const Bytes& file, Rows* rows) {
  BlockRows block;
  for (BlockDecoder blocks(BlocksOf(file)); !blocks.AtEnd();) {
    const Status status = blocks.Next(&block);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const BlockShape& shape = block.shape;
    for (size_t i = 0; i < block.signs.size(); ++i) {
      Row row{shape.dim, block.ages[i], shape.has_scalar ? block.scalars[i] : 0, {}};
      const float* embedding = block.embeddings() + i * shape.dim;
      const float* state = block.state() + i * shape.state_floats;
      row.values.assign(embedding, embedding + shape.dim);
      row.values.insert(row.values.end(), state, state + shape.state_floats);
      EXPECT_TRUE(rows->emplace(block.signs[i], row).second) << "twice: " << block.signs[i];
    }
  }
}

inline std::unique_ptr<Snapshot> BeginSnapshot(store::EmbeddingStore& store,
                                               Snapshot::Options options = {}) {
  auto snapshot = Snapshot::Begin(store, options);
  EXPECT_TRUE(snapshot.ok()) << snapshot.status().ToString();
  return std::move(snapshot).value();
}

inline std::vector<Bytes> Files(Snapshot& snapshot) {
  std::vector<Bytes> files(snapshot.num_parts());
  for (uint32_t i = 0; i < snapshot.num_parts(); ++i) {
    const Status status = ReadAll(*snapshot.part(i).value(), &files[i]);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return files;
}

inline Rows RowsOf(const std::vector<Bytes>& files) {
  Rows rows;
  for (const Bytes& file : files) AddRows(file, &rows);
  return rows;
}

inline Rows RowsOf(store::EmbeddingStore& store, uint32_t num_parts = 1) {
  return RowsOf(Files(*BeginSnapshot(store, {.num_parts = num_parts})));
}

}  // namespace persia::checkpoint

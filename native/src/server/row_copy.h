// RowCopy and RowReceiver: the copy of a primary's rows for a new standby, while training
// continues.
//
// The copy shows one moment, between two operations: the rows with their optimizer state and their
// place in the order of eviction, as blocks of a checkpoint file; the config; and the updates that
// the primary recognises when they are repeated.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/row_protocol.h"
#include "base/status.h"
#include "base/train_config.h"
#include "checkpoint/loader.h"
#include "checkpoint/row_feed.h"
#include "server/update_deduplicator.h"
#include "store/embedding_store.h"
#include "store/store_snapshot.h"

namespace persia::server {

class RowCopy {
 public:
  // Blocks until the standby has the piece.
  using Send = std::function<Status(ReplicateKind kind, std::span<const std::byte> body)>;

  // The store must outlive it. No update may be under way. kFailedPrecondition: a dump, or another
  // copy, is under way.
  static StatusOr<std::unique_ptr<RowCopy>> Begin(store::EmbeddingStore& store,
                                                  const UpdateDeduplicator& updates);
  // Sends all pieces in their order; stops at the first failure.
  Status SendTo(const Send& send);

 private:
  RowCopy(std::unique_ptr<store::StoreSnapshot> rows, std::vector<AppliedUpdate> updates)
      : rows_(std::move(rows)), updates_(std::move(updates)) {}

  Status SendRows(const Send& send);

  const std::unique_ptr<store::StoreSnapshot> rows_;
  const std::vector<AppliedUpdate> updates_;
};

class RowReceiver {
 public:
  RowReceiver(store::EmbeddingStore* store, UpdateDeduplicator* updates)
      : store_(*store), updates_(*updates) {}

  // A piece, in the order of RowCopy. Repeating the last one changes nothing.
  Status Take(ReplicateKind kind, std::span<const std::byte> body);

 private:
  Status TakeConfig(std::span<const std::byte> body);

  store::EmbeddingStore& store_;
  UpdateDeduplicator& updates_;
  std::unique_ptr<checkpoint::Loader> loader_;  // null: the primary has no config, and no rows
};

}  // namespace persia::server

// RowGathering: a new server's end of a change of the number of servers (ADR 34): it gathers its
// rows from all servers of before (server/row_transfer.h).
//
// Signs of two of them are never the same, so what comes from one needs no order with what comes
// from another.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "base/placement.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "base/train_config.h"
#include "checkpoint/loader.h"
#include "server/inherited_updates.h"
#include "store/embedding_store.h"

namespace persia::server {

// ReplicateRequest::number of a piece: counted from 0 for each target, and the sender's index.
constexpr uint64_t PieceNumber(uint32_t piece, uint32_t source) {
  return uint64_t{piece} << 32 | source;
}

class RowGathering {
 public:
  // `incarnation`: of this server, one of `num_servers`.
  RowGathering(store::EmbeddingStore* store, InheritedUpdates* updates, uint64_t incarnation,
               uint32_t num_sources, uint32_t num_servers)
      : store_(*store),
        updates_(*updates),
        incarnation_(incarnation),
        num_sources_(num_sources),
        placement_(num_servers) {}

  // A piece of the server and with the number that `message.number` has (PieceNumber). Repeated, it
  // changes nothing. kFailedPrecondition: it is for another server, or not the next one.
  Status Take(const ReplicateRequest& message);
  bool is_complete() const;
  // Of the rows that were sent; known once they are complete.
  Placement placement() const;
  bool has_begun() const;

 private:
  // One of the servers of before.
  struct Source {
    std::mutex mutex;  // one piece at a time; taken before the other one
    uint64_t incarnation = 0;
    uint32_t next = 0;  // piece
  };

  StatusOr<Source*> Find(const ReplicateRequest& message);
  Status TakePiece(const ReplicateRequest& message, uint32_t source);
  // Require mutex_, but for TakeRows.
  Status TakeConfig(std::span<const std::byte> body);
  Status TakeRows(std::span<const std::byte> body);
  Status TakeEnd(uint32_t source, std::span<const std::byte> moved);

  store::EmbeddingStore& store_;
  InheritedUpdates& updates_;
  const uint64_t incarnation_;
  const uint32_t num_sources_;
  mutable std::mutex mutex_;            // guards what follows, but for what a Source guards
  std::map<uint32_t, Source> sources_;  // by index
  std::set<uint32_t> ended_;
  Placement placement_;  // as the first source that has ended says
  std::optional<TrainConfig> config_;
  std::shared_ptr<checkpoint::Loader> loader_;  // null: no source has rows yet, or all have ended
};

}  // namespace persia::server

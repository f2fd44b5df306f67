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

#include "base/row_protocol.h"
#include "base/status.h"
#include "base/train_config.h"
#include "checkpoint/loader.h"
#include "server/inherited_updates.h"
#include "store/embedding_store.h"

namespace persia::server {

class RowGathering {
 public:
  // `incarnation`: of this server.
  RowGathering(store::EmbeddingStore* store, InheritedUpdates* updates, uint64_t incarnation,
               uint32_t num_sources)
      : store_(*store), updates_(*updates), incarnation_(incarnation), num_sources_(num_sources) {}

  // A piece of server `message.number`. kFailedPrecondition: it is for another server, or of a
  // server that has ended already.
  Status Take(const ReplicateRequest& message);
  bool is_complete() const;

 private:
  // Require mutex_, but for TakeRows.
  Status CheckSource(const ReplicateRequest& message);
  Status TakeConfig(std::span<const std::byte> body);
  Status TakeRows(std::span<const std::byte> body);
  Status TakeUpdates(std::span<const std::byte> body);
  Status TakeEnd(uint32_t source);

  store::EmbeddingStore& store_;
  InheritedUpdates& updates_;
  const uint64_t incarnation_;
  const uint32_t num_sources_;
  mutable std::mutex mutex_;              // guards what follows
  std::map<uint32_t, uint64_t> sources_;  // incarnation, by index
  std::set<uint32_t> ended_;
  std::optional<TrainConfig> config_;
  std::shared_ptr<checkpoint::Loader> loader_;  // null: no source has rows yet, or all have ended
};

}  // namespace persia::server

// RowService: where an embedding worker gets rows and sends gradients. Two implementations: the
// parameter servers of a cluster over RPC (worker/remote_rows.h), and stores inside this process
// (client/embedded_rows.h). The worker does not know which one it has.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "base/train_config.h"

namespace persia::worker {

using Deadline = std::chrono::steady_clock::time_point;

// What one server is asked for: `signs` holds the blocks'
// signs one after the other; all are routed to that server.
struct ServerBlocks {
  struct Block {
    uint32_t dim;
    uint32_t num_signs;
  };
  std::vector<Block> blocks;
  std::vector<uint64_t> signs;

  uint64_t num_floats() const {
    uint64_t n = 0;
    for (const Block& b : blocks) n += uint64_t{b.dim} * b.num_signs;
    return n;
  }
};

// A server's answer to a lookup: the rows lie in `storage`.
struct ServerRows {
  Buffer storage;
  std::span<const float> rows;
  uint64_t incarnation = 0;
  uint64_t update_counter = 0;
};

struct UpdateKey {
  uint64_t worker_incarnation = 0;
  uint64_t reference = 0;
};

struct UpdateResult {
  uint64_t staleness = 0;
  uint64_t num_updated = 0;
  uint64_t num_missing = 0;
  // Of each lookup of the batch, in the order of ServerUpdate::updates_until; 0 where no row of it
  // was asked for.
  std::vector<uint64_t> lookup_staleness = {};
};

struct ServerUpdate {
  const ServerBlocks* blocks = nullptr;
  std::span<const float> gradients;
  uint64_t lookup_incarnation = 0;
  uint64_t lookup_counter = 0;
  // For each lookup of the batch: updates from the first one there until it; nullopt: this server
  // was not asked.
  std::vector<std::optional<uint64_t>> updates_until = {};
};

// Joins one server's answer to an update with those of the others.
inline void AddUpdate(const ServerUpdate& update, const UpdateResult& answer, UpdateResult* sum) {
  sum->staleness = std::max(sum->staleness, answer.staleness);
  sum->num_updated += answer.num_updated;
  sum->num_missing += answer.num_missing;
  sum->lookup_staleness.resize(update.updates_until.size());
  for (size_t i = 0; i < update.updates_until.size(); ++i) {
    const std::optional<uint64_t> until = update.updates_until[i];
    if (!until.has_value()) continue;
    const uint64_t staleness = answer.staleness - std::min(answer.staleness, *until);
    sum->lookup_staleness[i] = std::max(sum->lookup_staleness[i], staleness);
  }
}

// Of a hint: signs for servers that want to be told, and those of them that were not sent, because
// a server has not taken in the ones before.
struct Announced {
  uint64_t num_signs = 0;
  uint64_t num_dropped = 0;
};

// Thread-safe. All calls go to all servers in parallel and return when the last has answered or at
// the deadline; entry i of a span belongs to server i, and a server with no signs is not called.
class RowService {
 public:
  virtual ~RowService() = default;
  virtual uint32_t num_servers() const = 0;
  virtual Status Configure(const TrainConfig& config, bool replace, Deadline deadline) = 0;
  virtual StatusOr<std::vector<ServerRows>> Lookup(std::span<const ServerBlocks> requests,
                                                   bool train, Deadline deadline) = 0;
  // A hint that lookups of these are to come: returns at once. Not for the use of one who got false
  // below.
  virtual Announced Prefetch(std::span<const ServerBlocks> /*requests*/) { return {}; }
  // Whether some server has rows in a file, as far as is known.
  virtual bool WantsPrefetch() { return false; }
  // The sum of num_updated and num_missing, the largest staleness of each kind.
  virtual StatusOr<UpdateResult> Update(UpdateKey key, std::span<const ServerUpdate> updates,
                                        Deadline deadline) = 0;
  virtual Status SetRows(std::span<const ServerBlocks> requests,
                         std::span<const std::span<const float>> rows, Deadline deadline) = 0;
  virtual Status Clear(Deadline deadline) = 0;
  // Rows per server.
  virtual StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) = 0;
};

}  // namespace persia::worker

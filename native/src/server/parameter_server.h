// ParameterServer: one embedding store behind RPC. Wire formats: docs/wire_format.md.
//
// An update carries the key (worker incarnation, reference) and is
// applied once however often it is sent: the server remembers the recent
// keys of each worker, far more of them than a worker can have in flight.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "net/server.h"
#include "store/embedding_store.h"

namespace persia::server {

struct ServerStats {
  uint64_t num_updates = 0;           // update requests applied, each key once
  uint64_t num_repeated_updates = 0;  // answered from memory
  uint64_t max_staleness = 0;         // updates between a batch's lookup and its own update
  uint64_t sum_staleness = 0;
  uint64_t num_looked_up_rows = 0;  // asked for, found or not
  double last_missing_ratio = 0;    // of the latest lookup's rows, those without a row before it
  bool configured = false;
  net::ServerStats rpc;
  store::StoreStats store;
};

class ParameterServer {
 public:
  struct Options {
    uint32_t replica_index = 0;
    uint32_t replica_size = 1;
    store::EmbeddingStore::Options store;
    std::optional<store::TierOptions> tier;  // without one, rows are in memory alone
    net::Server::Options rpc;
    // For inference: what would change rows is refused (kFailedPrecondition), and everything
    // (kUnavailable) until MarkLoaded.
    bool read_only = false;
  };

  // Draws the incarnation. Refuses replica_index >= replica_size and what the store refuses. With a
  // tier it returns when all rows of its pool are recovered.
  static StatusOr<std::unique_ptr<ParameterServer>> Create(const Options& options);
  ~ParameterServer();

  StatusOr<uint16_t> Start();
  void Stop(std::chrono::milliseconds timeout);
  // A read-only server answers from now on. Of others nothing changes.
  void MarkLoaded();

  uint64_t incarnation() const;
  ServerStats stats() const;
  // The phases of this server's work; as long as it lives.
  std::vector<const DurationStats*> durations() const;
  store::EmbeddingStore& embedding_store();

 private:
  class Impl;
  explicit ParameterServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::server

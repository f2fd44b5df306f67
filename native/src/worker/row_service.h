// RowService: where an embedding worker reads rows and sends gradients.
//
// The worker does not know which of the two implementations it has: RemoteRows below calls the
// parameter servers of a cluster over RPC; client/embedded_client.cc has a store in this process.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/placement.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "base/train_config.h"
#include "net/types.h"
#include "worker/types.h"

namespace persia::net {
class Channel;
}

namespace persia::worker {

class PrefetchHints;

// The signs that one server is asked for: all are routed to that server.
struct ServerBlocks {
  std::vector<SignBlock> blocks;
  std::vector<uint64_t> signs;

  // Valid until the vectors change.
  SignBlocks view() const { return {blocks, signs}; }
  uint64_t num_floats() const { return view().num_floats(); }
};

// What became of a prefetch hint.
struct HintReport {
  uint64_t num_signs = 0;    // for servers that want hints
  uint64_t num_dropped = 0;  // of these, not sent: a server has not processed the hints before
};

// Thread-safe. All calls go to all servers in parallel and return when the last has answered or at
// the deadline. Entry i of a span or of a result belongs to server i; a server with no signs is not
// called, and its result is empty.
//
// The servers may be replaced. Requests that are routed by another placement than theirs fail
// (kUnavailable), as do those under way when it changes: the caller compares placement() with that
// of its requests, and routes them anew.
class RowService {
 public:
  virtual ~RowService() = default;
  virtual Placement placement() const = 0;
  virtual Status Configure(const TrainConfig& config, bool replace, Deadline deadline) = 0;
  // `train`: the batch was made with requires_grad, so rows of new signs are inserted.
  virtual StatusOr<std::vector<ServerRows>> Lookup(const Placement& routed,
                                                   std::span<const ServerBlocks> requests,
                                                   bool train, Deadline deadline) = 0;
  // For training, with optimizer state (store/whole_rows.h). Servers know how many floats a row
  // has. Servers with no signs are called, too.
  virtual StatusOr<std::vector<ServerRows>> LookupWhole(const Placement& /*routed*/,
                                                        std::span<const ServerBlocks> /*requests*/,
                                                        Deadline /*deadline*/) {
    return FailedPrecondition("rows of this process have no network to hide");
  }
  // Hints that lookups will name these signs soon; returns at once. Call only if WantsPrefetch()
  // returned true.
  virtual HintReport Prefetch(const Placement& /*routed*/,
                              std::span<const ServerBlocks> /*requests*/) {
    return {};
  }
  // Whether some server has rows in a file, as far as is known.
  virtual bool WantsPrefetch() { return false; }
  virtual StatusOr<std::vector<UpdateResult>> Update(const Placement& routed,
                                                     std::span<const UpdateRowsRequest> requests,
                                                     Deadline deadline) = 0;
  virtual Status SetRows(const Placement& routed, std::span<const SetRowsRequest> requests,
                         Deadline deadline) = 0;
  virtual Status Clear(Deadline deadline) = 0;
  // Rows per server.
  virtual StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) = 0;
};

// The parameter servers of a cluster.
class RemoteRows final : public RowService {
 public:
  explicit RemoteRows(const Placement& placement);
  ~RemoteRows() override;

  // Tells the server's address, when it is discovered and whenever it has moved. kInvalidArgument:
  // no such index.
  Status SetServer(uint32_t index, const std::string& address);
  // Other servers, which have the rows from now on: by index. What is under way at those of before
  // fails with kUnavailable.
  void ReplaceServers(const Placement& placement, std::span<const std::string> addresses);
  // Fails with kUnavailable the calls under way and all later ones: a worker that stops need not
  // wait for servers that are gone.
  void Close();
  // Of the channel to each server.
  std::vector<net::ChannelStats> channel_stats() const;
  // By server. Fails where one of them does: a comparison needs all.
  StatusOr<std::vector<ServerLoad>> Loads(Deadline deadline);

  Placement placement() const override { return Present()->placement; }
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override;
  StatusOr<std::vector<ServerRows>> Lookup(const Placement& routed,
                                           std::span<const ServerBlocks> requests, bool train,
                                           Deadline deadline) override;
  StatusOr<std::vector<ServerRows>> LookupWhole(const Placement& routed,
                                                std::span<const ServerBlocks> requests,
                                                Deadline deadline) override;
  // Asks each server once whether it wants hints, with the first call of WantsPrefetch(), and again
  // where it has moved. Servers that read no rows from a file get none.
  HintReport Prefetch(const Placement& routed, std::span<const ServerBlocks> requests) override;
  bool WantsPrefetch() override;
  StatusOr<std::vector<UpdateResult>> Update(const Placement& routed,
                                             std::span<const UpdateRowsRequest> requests,
                                             Deadline deadline) override;
  Status SetRows(const Placement& routed, std::span<const SetRowsRequest> requests,
                 Deadline deadline) override;
  Status Clear(Deadline deadline) override;
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override;

 private:
  struct Server {
    std::shared_ptr<PrefetchHints> hints;
    std::unique_ptr<net::Channel> channel;
  };
  struct Servers {  // never changed once it is made
    Placement placement;
    std::vector<Server> servers;  // by index
  };

  static std::shared_ptr<const Servers> Make(const Placement& placement);
  // A call keeps the servers that it began with.
  std::shared_ptr<const Servers> Present() const;
  template <typename Request, typename Reply>
  StatusOr<std::vector<Reply>> CallSome(const Method<Request, Reply>& method,
                                        const Placement& routed, std::span<const Request> requests,
                                        Deadline deadline, bool also_empty = false);
  template <typename Request, typename Reply>
  StatusOr<std::vector<Reply>> CallEvery(const Method<Request, Reply>& method,
                                         const Request& request, Deadline deadline);

  mutable std::mutex mutex_;  // guards what follows
  std::shared_ptr<const Servers> servers_;
  bool is_closed_ = false;
};

}  // namespace persia::worker

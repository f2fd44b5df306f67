// RemoteRows: the parameter servers of a cluster as a RowService.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "net/rpc_stats.h"
#include "worker/row_service.h"

namespace persia::worker {

class RemoteRows : public RowService {
 public:
  explicit RemoteRows(uint32_t num_servers);
  ~RemoteRows() override;

  // Called when a server is discovered and whenever it
  // comes back elsewhere. kInvalidArgument: no such index.
  Status SetServer(uint32_t index, const std::string& address);

  // Fails with kUnavailable the calls under way and all later ones: a worker that stops need not
  // wait for servers that are gone.
  void Close();

  // Of the channel to each server.
  std::vector<net::ChannelStats> channel_stats() const;

  uint32_t num_servers() const override;
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override;
  StatusOr<std::vector<ServerRows>> Lookup(std::span<const ServerBlocks> requests, bool train,
                                           Deadline deadline) override;
  // Servers are asked once, with the first call of WantsPrefetch(), and again where they come back;
  // those that read no rows from a file are sent nothing more.
  Announced Prefetch(std::span<const ServerBlocks> requests) override;
  bool WantsPrefetch() override;
  StatusOr<UpdateResult> Update(UpdateKey key, std::span<const ServerUpdate> updates,
                                Deadline deadline) override;
  Status SetRows(std::span<const ServerBlocks> requests,
                 std::span<const std::span<const float>> rows, Deadline deadline) override;
  Status Clear(Deadline deadline) override;
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::worker

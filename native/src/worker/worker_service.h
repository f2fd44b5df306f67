// WorkerService: an EmbeddingWorker behind RPC (the embedding worker methods of
// docs/wire_format.md).
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "net/server.h"
#include "worker/embedding_worker.h"

namespace persia::worker {

class WorkerService {
 public:
  WorkerService(std::shared_ptr<EmbeddingWorker> worker, net::Server::Options options);
  ~WorkerService();

  StatusOr<uint16_t> Start();
  // Answers what is being worked on, then closes.
  void Stop(std::chrono::milliseconds timeout);

  net::ServerStats stats() const;
  std::vector<const DurationStats*> durations() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::worker

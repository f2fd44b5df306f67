// WorkerService: an EmbeddingWorker behind RPC, with the methods of worker_protocol.h.
//
// Requests run concurrently on the RPC server's threads. Each gives the worker a tenth less time
// than its caller gave it (20 ms to 1 s), so that an error that names a dead or silent parameter
// server still reaches the caller. Thread-safe.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "net/server.h"
#include "worker/embedding_worker.h"

namespace persia::worker {

class WorkerService {
 public:
  // Registers all methods; nothing is served before Start(). The worker is shared, because its role
  // registers batches beside the service.
  WorkerService(std::shared_ptr<EmbeddingWorker> worker, net::ServerOptions options);

  // See net::Server.
  StatusOr<uint16_t> Start(const std::string& host = "127.0.0.1", uint16_t port = 0) {
    return rpc_.Start(host, port);
  }
  // Answers what is being worked on, then closes.
  // Calls that wait for servers end by their own deadlines; the role closes the channels to the
  // servers to end them sooner.
  void Stop(std::chrono::milliseconds timeout) { rpc_.Stop(timeout); }

  void AddMetrics(Metrics* metrics) const { rpc_.AddMetrics(metrics); }
  // The time in the handlers, which the worker's own phases are part of.
  std::vector<const DurationStats*> durations() const { return rpc_.durations(); }

 private:
  // `handle` is called with the request and the worker's deadline.
  template <typename Request, typename Reply, typename Function>
  void Register(const Method<Request, Reply>& method, Function handle);

  const std::shared_ptr<EmbeddingWorker> worker_;
  net::Server rpc_;  // last: destroyed first, so that no handler outlives what it uses
};

}  // namespace persia::worker

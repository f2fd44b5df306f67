// EmbeddingClient: what an NN worker, an evaluation or an inference process needs of the embedding
// workers.
//
// Two implementations behind one interface: RemoteClient (remote_client.h) calls embedding workers
// over RPC, EmbeddedClient (embedded_client.h) has the worker and the store in this process.
// Scripts, contexts and tests do not know which one they have.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "worker/embeddings_message.h"
#include "worker/types.h"

namespace persia::client {

using worker::BatchReference;
using worker::Deadline;
using worker::kAllSlots;
using worker::LookupResult;
using worker::ReturnReport;
using worker::SlotGradient;
using worker::SlotMask;

// Thread-safe. Every call ends by its deadline.
class EmbeddingClient {
 public:
  virtual ~EmbeddingClient() = default;

  // Reaches every server; `replace` allows another config than the one that a server has.
  virtual Status Configure(const TrainConfig& config, bool replace, Deadline deadline) = 0;
  // `slots`: see EmbeddingWorker. All others are absent from the result. `as_rows`: the caller
  // pools slots that are there as distinct rows, and returns one gradient for each.
  virtual StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                        Deadline deadline, SlotMask slots = kAllSlots,
                                        bool as_rows = false) = 0;
  // `worker_index` is taken modulo the number of workers. `original`: the batch at a worker that
  // has died, see EmbeddingWorker.
  virtual StatusOr<LookupResult> LookupDirect(uint32_t worker_index,
                                              std::span<const std::byte> id_features,
                                              bool requires_grad, Deadline deadline,
                                              SlotMask slots = kAllSlots,
                                              const BatchReference& original = {},
                                              bool as_rows = false) = 0;
  // Applied once, however often it is called for a batch: a repetition gets the first report.
  // Gradients are divided by `scale`.
  virtual StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                                 std::span<const SlotGradient> gradients,
                                                 Deadline deadline) = 0;
  // Gives a batch up that gets no gradients; releasing twice is fine.
  virtual Status Release(const BatchReference& reference, Deadline deadline) = 0;
  // Writes rows of `dim` floats, one behind the other, by sign (prefix included).
  virtual Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs,
                               std::span<const float> rows, Deadline deadline) = 0;
  virtual Status Clear(Deadline deadline) = 0;
  // Between the two, rows may be set, cleared or loaded, and lookups of an exact context wait.
  // kFailedPrecondition: `what` would happen while such a context has batches in flight.
  virtual Status BeginOtherRows(const std::string& /*what*/) { return Status::Ok(); }
  virtual void EndOtherRows() {}
  // Rows per parameter server.
  virtual StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) = 0;
};

}  // namespace persia::client

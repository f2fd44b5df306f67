// EmbeddingClient: what an NN worker, an evaluation or
// an inference process needs of the embedding workers.
//
// Two implementations behind one interface: RemoteClient calls embedding workers over RPC,
// EmbeddedClient holds the worker and the store in this process. Scripts, contexts and tests do not
// know which one they have.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/duration_stats.h"
#include "base/status.h"
#include "base/train_config.h"
#include "net/rpc_stats.h"
#include "store/embedding_store.h"
#include "worker/embedding_worker.h"
#include "worker/wire_floats.h"

namespace persia::client {

using worker::Deadline;
using worker::kAllParts;
using worker::LookupParts;
using worker::ReturnReport;
using worker::SlotGradient;

// A batch that an embedding worker holds.
struct BatchReference {
  uint32_t worker_index = 0;
  uint64_t worker_incarnation = 0;
  uint64_t reference = 0;
};

// One slot's embeddings, in place inside the memory of the LookupResult.
struct SlotEmbedding {
  std::string name;
  bool raw = false;
  bool absent = false;  // of a part that was not asked for: no rows
  uint32_t dim = 0;
  uint32_t num_rows = 0;
  uint32_t sample_fixed_size = 0;
  const float* rows = nullptr;               // [num_rows, dim]
  const int64_t* index = nullptr;            // raw: [batch_size, sample_fixed_size]
  const uint32_t* sample_num_ids = nullptr;  // raw: [batch_size]
};

struct LookupResult {
  BatchReference reference;  // reference.reference == 0: no gradient is expected
  uint32_t batch_size = 0;
  std::vector<SlotEmbedding> slots;
  Buffer storage;
  std::vector<Buffer> widened;  // rows that came with 16 bits
};

// Decodes an embeddings message in place; kCorruption names what is wrong. Sizes, indices and dims
// are checked (an index never points past the rows).
StatusOr<LookupResult> DecodeEmbeddings(uint32_t worker_index, Buffer message);

// Thread-safe. Every call ends by its deadline.
class EmbeddingClient {
 public:
  virtual ~EmbeddingClient() = default;

  virtual Status Configure(const TrainConfig& config, bool replace, Deadline deadline) = 0;
  // Parts: see EmbeddingWorker. Slots of other parts are absent from the result.
  virtual StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                        Deadline deadline, LookupParts parts) = 0;
  // `worker_index` is taken modulo the number of workers.
  virtual StatusOr<LookupResult> LookupDirect(uint32_t worker_index,
                                              std::span<const std::byte> id_features,
                                              bool requires_grad, Deadline deadline,
                                              LookupParts parts) = 0;
  // All slots.
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline) {
    return Lookup(reference, requires_grad, deadline, kAllParts);
  }
  StatusOr<LookupResult> LookupDirect(uint32_t worker_index, std::span<const std::byte> id_features,
                                      bool requires_grad, Deadline deadline) {
    return LookupDirect(worker_index, id_features, requires_grad, deadline, kAllParts);
  }
  virtual StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                                 std::span<const SlotGradient> gradients,
                                                 Deadline deadline) = 0;
  virtual Status Release(const BatchReference& reference, Deadline deadline) = 0;
  virtual Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs,
                               std::span<const float> rows, Deadline deadline) = 0;
  virtual Status Clear(Deadline deadline) = 0;
  // Rows per parameter server.
  virtual StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) = 0;
};

class RemoteClient : public EmbeddingClient {
 public:
  // `num_workers` embedding workers to begin with; each must get its
  // address by SetWorker before calls to it go through.
  // Embeddings and gradients travel as `dtype`.
  static StatusOr<std::shared_ptr<RemoteClient>> Create(
      uint32_t num_workers, worker::WireDtype dtype = worker::WireDtype::kFloat32);
  // The worker's address from now on. An index beyond those known adds a worker.
  virtual Status SetWorker(uint32_t index, const std::string& address) = 0;
  // Of the channel to each worker.
  virtual std::vector<net::ChannelStats> channel_stats() const = 0;
  // The phases of the calls; as long as the client lives.
  virtual std::vector<const DurationStats*> durations() const = 0;
  // Nothing more is asked of the worker but what concerns the batches that it holds; until
  // SetWorker.
  virtual void RetireWorker(uint32_t index) = 0;
};

// Worker and store in this process; several may live side by side and share nothing. Also takes
// batches the way a loader sends them.
class EmbeddedClient : public EmbeddingClient {
 public:
  static StatusOr<std::shared_ptr<EmbeddedClient>> Create(
      worker::WorkerOptions options, store::EmbeddingStore::Options store,
      const std::optional<store::TierOptions>& tier = std::nullopt);
  virtual StatusOr<BatchReference> Register(uint32_t loader_index,
                                            std::span<const std::byte> id_features) = 0;
  // For snapshots and loading.
  virtual store::EmbeddingStore& embedding_store() = 0;
};

}  // namespace persia::client

// EmbeddingClient: what an NN worker, an evaluation or an inference process needs of the embedding
// workers.
//
// Two implementations behind one interface: RemoteClient calls embedding workers over RPC,
// EmbeddedClient has the worker and the store in this process. Scripts, contexts and tests do not
// know which one they have.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/duration_stats.h"
#include "base/status.h"
#include "base/train_config.h"
#include "client/worker_channels.h"
#include "store/embedding_store.h"
#include "worker/embedding_worker.h"
#include "worker/wire_floats.h"
#include "worker/worker_protocol.h"

namespace persia::client {

using worker::Deadline;
using worker::kAllStages;
using worker::ReturnReport;
using worker::SlotGradient;
using worker::StageMask;

// A batch, and which embedding worker holds it.
struct BatchReference : BatchKey {
  uint32_t worker_index = 0;
};

// One slot's embeddings, in place inside the memory of the LookupResult.
struct SlotEmbedding {
  std::string name;
  bool raw = false;
  bool absent = false;  // of a stage that was not asked for: no rows
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
  // Stages: see EmbeddingWorker. Slots of other stages are absent from the result.
  virtual StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                        Deadline deadline, StageMask stages = kAllStages) = 0;
  // `worker_index` is taken modulo the number of workers.
  virtual StatusOr<LookupResult> LookupDirect(uint32_t worker_index,
                                              std::span<const std::byte> id_features,
                                              bool requires_grad, Deadline deadline,
                                              StageMask stages = kAllStages) = 0;
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

// Batches go to the worker that holds them. What concerns the servers goes through one worker,
// because each reaches all servers. The configuration goes to every worker, because each configures
// servers that restart.
class RemoteClient final : public EmbeddingClient {
 public:
  // `num_workers` embedding workers to begin with; each must get its address by SetWorker before
  // calls to it go through. Embeddings and gradients travel as `dtype`.
  static StatusOr<std::shared_ptr<RemoteClient>> Create(
      uint32_t num_workers, worker::WireDtype dtype = worker::WireDtype::kFloat32);

  // Sets the worker's address from now on. An index beyond those known adds a worker.
  Status SetWorker(uint32_t index, const std::string& address) {
    return workers_.Set(index, address);
  }
  // Asks the worker for nothing but the batches that it holds, until SetWorker.
  void RetireWorker(uint32_t index) { workers_.Retire(index); }
  // Of the channel to each worker.
  std::vector<net::ChannelStats> channel_stats() const;
  // The phases of the calls; as long as the client lives.
  std::vector<const DurationStats*> durations() const {
    return {&lookup_times_, &decode_times_, &return_times_};
  }

  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override;
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, StageMask stages = kAllStages) override;
  StatusOr<LookupResult> LookupDirect(uint32_t worker_index, std::span<const std::byte> id_features,
                                      bool requires_grad, Deadline deadline,
                                      StageMask stages = kAllStages) override;
  StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline) override;
  Status Release(const BatchReference& reference, Deadline deadline) override;
  Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs, std::span<const float> rows,
                       Deadline deadline) override;
  Status Clear(Deadline deadline) override;
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override;

 private:
  RemoteClient(uint32_t num_workers, worker::WireDtype dtype)
      : dtype_(dtype), workers_(num_workers) {}

  // The worker for what concerns the servers.
  net::Channel& AnyWorker() const { return *workers_.Active().front().second; }
  template <typename Request>
  StatusOr<LookupResult> CallForEmbeddings(uint32_t worker, const Method<Request, Buffer>& method,
                                           const Request& request, Deadline deadline);
  worker::LookupOptions Options(bool requires_grad, StageMask stages) const {
    return {requires_grad, static_cast<uint32_t>(dtype_), stages};
  }

  const worker::WireDtype dtype_;
  DurationStats lookup_times_{"client lookup"};
  DurationStats decode_times_{"client decode"};
  DurationStats return_times_{"client return gradients"};
  WorkerChannels workers_;
};

// Worker and store in this process; several may live side by side and share nothing. Also takes
// batches the way a loader sends them.
class EmbeddedClient final : public EmbeddingClient {
 public:
  static StatusOr<std::shared_ptr<EmbeddedClient>> Create(
      worker::WorkerOptions options, store::EmbeddingStore::Options store,
      const std::optional<store::TierOptions>& tier = std::nullopt);

  StatusOr<BatchReference> Register(uint32_t loader_index, std::span<const std::byte> id_features);
  // For snapshots and loading.
  store::EmbeddingStore& embedding_store() { return store_; }

  // Deadlines are passed on to the worker, which waits for batches that are being worked on.
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override;
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, StageMask stages = kAllStages) override;
  StatusOr<LookupResult> LookupDirect(uint32_t worker_index, std::span<const std::byte> id_features,
                                      bool requires_grad, Deadline deadline,
                                      StageMask stages = kAllStages) override;
  StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline) override;
  Status Release(const BatchReference& reference, Deadline deadline) override;
  Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs, std::span<const float> rows,
                       Deadline deadline) override;
  Status Clear(Deadline deadline) override;
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override;

 private:
  EmbeddedClient(std::unique_ptr<worker::EmbeddingWorker> worker, store::EmbeddingStore& store)
      : worker_(std::move(worker)), store_(store) {}

  const std::unique_ptr<worker::EmbeddingWorker> worker_;  // owns the store's owner
  store::EmbeddingStore& store_;
};

}  // namespace persia::client

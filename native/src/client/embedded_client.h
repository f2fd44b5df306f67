// EmbeddedClient: an embedding worker and a store in this process as an EmbeddingClient.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "client/embedding_client.h"
#include "store/embedding_store.h"
#include "worker/embedding_worker.h"

namespace persia::client {

// Thread-safe; several may live side by side and share nothing. Also takes batches the way a loader
// sends them.
class EmbeddedClient final : public EmbeddingClient {
 public:
  // Refuses what EmbeddingWorker and EmbeddingStore refuse. With a `tier` it returns when the rows
  // of its file are recovered.
  static StatusOr<std::shared_ptr<EmbeddedClient>> Create(
      worker::WorkerOptions options, store::EmbeddingStore::Options store,
      const std::optional<store::TierOptions>& tier = std::nullopt);

  StatusOr<BatchReference> Register(uint32_t loader_index, std::span<const std::byte> id_features) {
    PERSIA_ASSIGN_OR_RETURN(const BatchKey key, worker_->Register(loader_index, id_features));
    return BatchReference{key, 0};
  }
  // For snapshots and loading.
  store::EmbeddingStore& embedding_store() { return store_; }

  // Deadlines are passed on to the worker, which waits for batches that are being worked on.
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override {
    return worker_->Configure(config, replace, deadline);
  }
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, SlotMask slots = kAllSlots) override {
    return Decode(worker_->Lookup(reference, requires_grad, deadline, slots));
  }
  StatusOr<LookupResult> LookupDirect(uint32_t /*worker_index*/,
                                      std::span<const std::byte> id_features, bool requires_grad,
                                      Deadline deadline, SlotMask slots = kAllSlots) override {
    return Decode(worker_->LookupDirect(id_features, requires_grad, deadline, slots));
  }
  StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline) override {
    return worker_->ReturnGradients(reference, scale, gradients, deadline);
  }
  Status Release(const BatchReference& reference, Deadline /*deadline*/) override {
    return worker_->Release(reference);
  }
  Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs, std::span<const float> rows,
                       Deadline deadline) override {
    const SignBlock block{dim, static_cast<uint32_t>(signs.size())};
    return worker_->SetEmbeddings({{&block, 1}, signs}, rows, deadline);
  }
  Status Clear(Deadline deadline) override { return worker_->Clear(deadline); }
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override {
    return worker_->Sizes(deadline);
  }

 private:
  EmbeddedClient(std::unique_ptr<worker::EmbeddingWorker> worker, store::EmbeddingStore& store)
      : worker_(std::move(worker)), store_(store) {}

  static StatusOr<LookupResult> Decode(StatusOr<Buffer> embeddings) {
    if (!embeddings.ok()) return embeddings.status();
    return worker::DecodeEmbeddings(0, std::move(embeddings).value());
  }

  const std::unique_ptr<worker::EmbeddingWorker> worker_;  // owns the store's owner
  store::EmbeddingStore& store_;
};

}  // namespace persia::client

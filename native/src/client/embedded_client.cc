#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "client/embedded_rows.h"
#include "client/embedding_client.h"

namespace persia::client {
namespace {

// One copy stands where a cluster has a network: the embeddings are decoded from a Buffer of their
// own, whatever parts the worker made them of.
Buffer Gather(const net::Parts& parts) {
  Buffer bytes(parts.size_bytes());
  size_t position = 0;
  for (const auto& view : parts.views) {
    if (view.empty()) continue;
    std::memcpy(bytes.data() + position, view.data(), view.size());
    position += view.size();
  }
  return bytes;
}

StatusOr<LookupResult> Decode(const StatusOr<net::Parts>& embeddings) {
  if (!embeddings.ok()) return embeddings.status();
  return DecodeEmbeddings(0, Gather(embeddings.value()));
}

worker::Reference ToReference(const BatchReference& reference) {
  return {reference.worker_incarnation, reference.reference};
}

// Deadlines are passed on to the worker, who waits for batches that are being worked on.
class InProcessClient final : public EmbeddedClient {
 public:
  InProcessClient(std::shared_ptr<EmbeddedRows> rows,
                  std::unique_ptr<worker::EmbeddingWorker> worker)
      : rows_(std::move(rows)), worker_(std::move(worker)) {}

  StatusOr<BatchReference> Register(uint32_t loader_index,
                                    std::span<const std::byte> id_features) override {
    auto reference = worker_->Register(loader_index, id_features);
    if (!reference.ok()) return reference.status();
    return BatchReference{0, reference->incarnation, reference->counter};
  }
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override {
    return worker_->Configure(config, replace, deadline);
  }
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, LookupParts parts) override {
    return Decode(worker_->Lookup(ToReference(reference), requires_grad, deadline, parts));
  }
  StatusOr<LookupResult> LookupDirect(uint32_t, std::span<const std::byte> id_features,
                                      bool requires_grad, Deadline deadline,
                                      LookupParts parts) override {
    return Decode(worker_->LookupDirect(id_features, requires_grad, deadline, parts));
  }
  StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline) override {
    return worker_->ReturnGradients(ToReference(reference), scale, gradients, deadline);
  }
  Status Release(const BatchReference& reference, Deadline) override {
    return worker_->Release(ToReference(reference));
  }
  Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs, std::span<const float> rows,
                       Deadline deadline) override {
    const worker::ServerBlocks::Block block{dim, static_cast<uint32_t>(signs.size())};
    return worker_->SetEmbeddings(std::span(&block, 1), signs, rows, deadline);
  }
  Status Clear(Deadline deadline) override { return worker_->Clear(deadline); }
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override {
    return worker_->Sizes(deadline);
  }
  store::EmbeddingStore& embedding_store() override { return rows_->embedding_store(); }

 private:
  const std::shared_ptr<EmbeddedRows> rows_;
  const std::unique_ptr<worker::EmbeddingWorker> worker_;
};

}  // namespace

StatusOr<std::shared_ptr<EmbeddedClient>> EmbeddedClient::Create(
    worker::WorkerOptions options, store::EmbeddingStore::Options store,
    const std::optional<store::TierOptions>& tier) {
  auto rows = EmbeddedRows::Create(store, tier);
  if (!rows.ok()) return rows.status();
  auto worker = worker::EmbeddingWorker::Create(std::move(options), rows.value());
  if (!worker.ok()) return worker.status();
  return std::shared_ptr<EmbeddedClient>(
      std::make_shared<InProcessClient>(std::move(rows).value(), std::move(worker).value()));
}

}  // namespace persia::client

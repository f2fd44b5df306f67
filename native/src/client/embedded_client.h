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
  // One worker and one store with the rules of a parameter server, so that a job trains as in a
  // cluster of one server. Opening a tier may take minutes; nothing else uses the client by then.
  static StatusOr<std::shared_ptr<EmbeddedClient>> Create(
      worker::WorkerOptions options, store::EmbeddingStore::Options store,
      const std::optional<store::TierOptions>& tier = std::nullopt);

  // Buffers the batch until its Lookup(), under the limits of an embedding worker:
  // kResourceExhausted means that the loader must wait. The bytes are copied.
  StatusOr<BatchReference> Register(uint32_t loader_index, std::span<const std::byte> id_features) {
    PERSIA_ASSIGN_OR_RETURN(const BatchKey key, worker_->Register(loader_index, id_features));
    return BatchReference{key, 0};
  }
  // For snapshots and loading.
  // Valid as long as the client. The store is thread-safe by itself; a load replaces rows under
  // running lookups as it would on a server.
  store::EmbeddingStore& embedding_store() { return store_; }

  // Deadlines are passed on to the worker, which waits for batches that are being worked on.
  // A call that has begun is not interrupted: there is no peer whose silence must be bounded, and a
  // store's calls are short.
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override {
    return worker_->Configure(config, replace, deadline);
  }
  // Waits for another request that works on the batch, until the deadline. Embeddings are in
  // float32: nothing is gained by 16 bits within a process.
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, SlotMask slots = kAllSlots,
                                bool as_rows = false) override {
    return Decode(worker_->Lookup(reference, requires_grad, deadline, slots, Form(as_rows)),
                  as_rows);
  }
  // There is one worker, so the index means nothing.
  // For evaluation and inference, and for scripts without a loader.
  StatusOr<LookupResult> LookupDirect(uint32_t /*worker_index*/,
                                      std::span<const std::byte> id_features, bool requires_grad,
                                      Deadline deadline, SlotMask slots = kAllSlots,
                                      const BatchReference& original = {},
                                      bool as_rows = false) override {
    return Decode(
        worker_->LookupDirect(id_features, requires_grad, deadline, slots, Form(as_rows), original),
        as_rows);
  }
  // Updates the store before it returns. A repetition gets the first report.
  StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline) override {
    return worker_->ReturnGradients(reference, scale, gradients, deadline);
  }
  // Ends a batch that will get no gradients. The worker bounds its own wait.
  Status Release(const BatchReference& reference, Deadline /*deadline*/) override {
    return worker_->Release(reference);
  }
  // Routed like a cluster's, to the only server.
  // The rows of `signs`, one after the other, `dim` floats each. They must be finite. Signs have
  // their group's prefix already.
  Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs, std::span<const float> rows,
                       Deadline deadline) override {
    const SignBlock block{dim, static_cast<uint32_t>(signs.size())};
    return worker_->SetEmbeddings({{&block, 1}, signs}, rows, deadline);
  }
  // Removes all rows and keeps the config.
  Status Clear(Deadline deadline) override { return worker_->Clear(deadline); }
  // One number: the store's rows.
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override {
    return worker_->Sizes(deadline);
  }

 private:
  // `store` is inside what `worker` owns: a reference to it is valid as long as the worker.
  EmbeddedClient(std::unique_ptr<worker::EmbeddingWorker> worker, store::EmbeddingStore& store)
      : worker_(std::move(worker)), store_(store) {}

  // The message is decoded like one from the network. That costs little, since rows are used in
  // place, and there is one form of results.
  static StatusOr<LookupResult> Decode(StatusOr<Buffer> embeddings, bool as_rows) {
    if (!embeddings.ok()) return embeddings.status();
    return worker::DecodeEmbeddings(0, std::move(embeddings).value(), as_rows);
  }
  // Nothing is gained by rows that are pooled in the next call. A rank that pools on a device asks
  // for them (`as_rows`): they are fewer bytes to copy there.
  static worker::EmbeddingsForm Form(bool as_rows) {
    return as_rows ? worker::EmbeddingsForm::kRows : worker::EmbeddingsForm::kPooled;
  }

  // The worker does not know that its RowService is in this process, so the client keeps its own
  // way to the store, for snapshots and loads.
  const std::unique_ptr<worker::EmbeddingWorker> worker_;  // owns the store's owner
  store::EmbeddingStore& store_;
};

}  // namespace persia::client

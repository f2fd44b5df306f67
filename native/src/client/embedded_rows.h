// EmbeddedRows: a store in this process as a RowService with one server.
//
// Does what a parameter server does with the same requests: refuses the same values and counts
// updates the same way, so that nothing trains differently in one process than in a cluster.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store/embedding_store.h"
#include "worker/row_service.h"

namespace persia::client {

// Thread-safe. A call that has begun is not interrupted;
// one whose deadline has passed is not begun.
class EmbeddedRows final : public worker::RowService {
 public:
  // Refuses what the store refuses. Without a tier rows are in memory alone.
  static StatusOr<std::shared_ptr<EmbeddedRows>> Create(
      const store::EmbeddingStore::Options& options, const std::optional<store::TierOptions>& tier);

  uint32_t num_servers() const override { return 1; }
  Status Configure(const TrainConfig& config, bool replace, worker::Deadline deadline) override;
  StatusOr<std::vector<worker::ServerRows>> Lookup(std::span<const worker::ServerBlocks> requests,
                                                   bool train, worker::Deadline deadline) override;
  worker::Announced Prefetch(std::span<const worker::ServerBlocks> requests) override;
  bool WantsPrefetch() override { return store_->WantsPrefetch(); }
  // The worker repeats an update only when it was not applied, so its key is not remembered here.
  StatusOr<worker::UpdateResult> Update(worker::UpdateKey key,
                                        std::span<const worker::ServerUpdate> updates,
                                        worker::Deadline deadline) override;
  Status SetRows(std::span<const worker::ServerBlocks> requests,
                 std::span<const std::span<const float>> rows, worker::Deadline deadline) override;
  Status Clear(worker::Deadline deadline) override;
  StatusOr<std::vector<uint64_t>> Sizes(worker::Deadline deadline) override;

  store::EmbeddingStore& embedding_store() { return *store_; }

 private:
  explicit EmbeddedRows(std::unique_ptr<store::EmbeddingStore> store);

  const uint64_t incarnation_;
  const std::unique_ptr<store::EmbeddingStore> store_;
  std::atomic<uint64_t> update_counter_{0};
};

}  // namespace persia::client

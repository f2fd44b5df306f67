#include "client/embedded_client.h"

#include <algorithm>
#include <cmath>

#include "server/parameter_server.h"

namespace persia::client {
namespace {

using server::ParameterServer;
using worker::ServerBlocks;

// A parameter server in this process as a RowService: its rules without its RPC, so that nothing
// trains differently than in a cluster. Thread-safe. A call that has begun is not interrupted; one
// whose deadline has passed is not begun.
class EmbeddedRows final : public worker::RowService {
 public:
  explicit EmbeddedRows(std::unique_ptr<ParameterServer> server) : server_(std::move(server)) {}

  store::EmbeddingStore& store() { return server_->embedding_store(); }

  Placement placement() const override { return {}; }
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override {
    PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
    return store().Configure(config, replace);
  }
  StatusOr<std::vector<ServerRows>> Lookup(const Placement& /*routed*/,
                                           std::span<const ServerBlocks> requests, bool train,
                                           Deadline deadline) override {
    PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
    std::vector<ServerRows> answers(1);
    // Like a server that is not asked: staleness does not count from a lookup of nothing.
    if (requests[0].signs.empty()) return answers;
    PERSIA_ASSIGN_OR_RETURN(answers[0], server_->Lookup({train, requests[0].view()}));
    return answers;
  }
  worker::HintReport Prefetch(const Placement& /*routed*/,
                              std::span<const ServerBlocks> requests) override {
    store().tier().Prefetch(requests[0].signs);  // which counts what it drops
    return {.num_signs = requests[0].signs.size()};
  }
  bool WantsPrefetch() override { return store().tier().WantsPrefetch(); }
  // The worker repeats an update only when it was not applied, so its key is not remembered here.
  StatusOr<std::vector<UpdateResult>> Update(const Placement& /*routed*/,
                                             std::span<const UpdateRowsRequest> requests,
                                             Deadline deadline) override {
    PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
    PERSIA_ASSIGN_OR_RETURN(const UpdateResult result, server_->Update(requests[0]));
    return std::vector{result};
  }
  Status SetRows(const Placement& /*routed*/, std::span<const SetRowsRequest> requests,
                 Deadline deadline) override {
    PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
    if (!std::ranges::all_of(requests[0].rows, [](float x) { return std::isfinite(x); })) {
      return InvalidArgument("rows: some values are NaN or infinite; set finite ones");
    }
    return server_->SetRows(requests[0]);
  }
  Status Clear(Deadline deadline) override {
    PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
    store().Clear();
    return Status::Ok();
  }
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override {
    PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
    return std::vector<uint64_t>{store().size()};
  }

 private:
  static Status CheckDeadline(Deadline deadline) {
    if (std::chrono::steady_clock::now() < deadline) return Status::Ok();
    return DeadlineExceeded("embedded store: the deadline has passed before the call began");
  }

  const std::unique_ptr<ParameterServer> server_;
};

}  // namespace

StatusOr<std::shared_ptr<EmbeddedClient>> EmbeddedClient::Create(
    worker::WorkerOptions options, store::EmbeddingStore::Options store,
    const std::optional<store::TierOptions>& tier) {
  // It is never started, so its RPC opens nothing.
  PERSIA_ASSIGN_OR_RETURN(auto server, ParameterServer::Create({.store = store, .tier = tier}));
  const auto rows = std::make_shared<EmbeddedRows>(std::move(server));
  PERSIA_ASSIGN_OR_RETURN(auto worker, worker::EmbeddingWorker::Create(std::move(options), rows));
  return std::shared_ptr<EmbeddedClient>(new EmbeddedClient(std::move(worker), rows->store()));
}

}  // namespace persia::client

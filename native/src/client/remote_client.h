// RemoteClient: the embedding workers of a cluster as an EmbeddingClient.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/duration_stats.h"
#include "client/distinct_batches.h"
#include "client/embedding_client.h"
#include "client/exact_rows.h"
#include "net/channel.h"
#include "worker/worker_protocol.h"

namespace persia::client {

// The embedding workers of a client: which there are, and which take new work.
//
// Workers may come and go while calls are under way. One that leaves takes no new work, but keeps
// its channel: it still answers for the batches that it holds. Thread-safe. A channel lives as long
// as a caller that got it from here uses it.
class WorkerChannels {
 public:
  // The shared pointer keeps a channel alive while a call uses it, also when its worker is replaced
  // meanwhile.
  using Link = std::pair<uint32_t, std::shared_ptr<net::Channel>>;  // index, channel

  // `num_workers` >= 1 workers, expected but without an address yet.
  explicit WorkerChannels(uint32_t num_workers);

  // The worker's address, from now on; it takes new work. An index beyond those known adds workers.
  // kInvalidArgument for an index that no job reaches.
  Status Set(uint32_t index, const std::string& address);
  // The worker takes no new work. Nothing happens for one that is not known.
  void Retire(uint32_t index);
  // The worker has died: calls to it that are pending fail with kUnavailable, and it is retired.
  void Drop(uint32_t index);

  // The worker that holds a batch; kInvalidArgument when it is not known.
  StatusOr<std::shared_ptr<net::Channel>> At(uint32_t index) const;
  // The workers that take new work, by index; all of them when none does. Never empty.
  std::vector<Link> Active() const;

 private:
  struct Worker {
    std::shared_ptr<net::Channel> channel;
    bool active = true;
  };
  // Requires mutex_, exclusively.
  void GrowTo(uint32_t num_workers, bool active);

  // Held only to read or change the list, never during a call: a worker that hangs must not keep
  // others from being found.
  mutable std::shared_mutex mutex_;
  std::vector<Worker> workers_;
};

// Batches go to the worker that holds them. What concerns the servers goes through one worker,
// because each reaches all servers. The configuration goes to every worker, because each configures
// servers that restart.
class RemoteClient final : public EmbeddingClient {
 public:
  // `num_workers` embedding workers to begin with; each must get its address by SetWorker before
  // calls to it go through. Embeddings and gradients travel as `dtype`.
  // At least one worker. None is called: a job may make its client before its workers are up.
  static StatusOr<std::shared_ptr<RemoteClient>> Create(
      uint32_t num_workers, worker::WireDtype dtype = worker::WireDtype::kFloat32);

  // Sets the worker's address from now on. An index beyond those known adds a worker.
  Status SetWorker(uint32_t index, const std::string& address) {
    return workers_.Set(index, address);
  }
  // Asks the worker for nothing but the batches that it holds, until SetWorker.
  void RetireWorker(uint32_t index) { workers_.Retire(index); }
  // Fails its pending calls with kUnavailable: it has died. SetWorker makes the index usable again.
  void DropWorker(uint32_t index) { workers_.Drop(index); }
  // Of the channel to each worker.
  // Workers that have left are not listed, unless all have.
  std::vector<net::ChannelStats> channel_stats() const;
  // Batches that came as distinct rows and await their gradients.
  const DistinctBatches& distinct_batches() const { return distinct_; }
  // The phases of the calls; as long as the client lives.
  std::vector<const DurationStats*> durations() const {
    return {&lookup_times_, &decode_times_, &return_times_};
  }

  // Calls of consistency="exact", whose lookups, steps and returns go through `rows`; in
  // exact_calls.cc. BeginExact comes before them, and before Configure. Clients of 16 bits a float
  // refuse it. With a reference of 0, LookupWhole is a direct lookup. Until an EndExact for each
  // BeginExact, other calls that train are refused.
  Status BeginExact(std::unique_ptr<ExactRows> rows);
  void EndExact();
  StatusOr<LookupResult> LookupWhole(const BatchReference& reference,
                                     std::span<const std::byte> id_features, Deadline deadline);
  StatusOr<LookupResult> PoolExact(const BatchReference& reference);
  Status ApplyExact(const BatchReference& reference, float scale,
                    std::span<const SlotGradient> gradients);
  // The batch's update is lost.
  void FailExact(const BatchReference& reference, const std::string& what);
  // kFailedPrecondition: `what` happened while batches are in flight.
  Status BeginOtherRows(const std::string& what) override;
  void EndOtherRows() override;
  // Of the last exact context of this client; null: there was none.
  std::shared_ptr<const ExactRows> exact_rows() const;

  // Fails where one active worker does, or is not reached by the deadline. The others then have the
  // config already, which does no harm: repeating it changes nothing.
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override;
  // kNotFound: the worker has restarted, or the batch has ended there. Nothing is left to release
  // then.
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, SlotMask slots = kAllSlots,
                                bool as_rows = false) override;
  StatusOr<LookupResult> LookupDirect(uint32_t worker_index, std::span<const std::byte> id_features,
                                      bool requires_grad, Deadline deadline,
                                      SlotMask slots = kAllSlots,
                                      const BatchReference& original = {},
                                      bool as_rows = false) override;
  // The gradients are sent from the caller's arrays, so these must stay as they are until it
  // returns. With a 16-bit dtype they are converted into memory of the request. Those of slots that
  // came as distinct rows are summed by row first.
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
  // The first of the active ones, so that successive calls reach the same worker and see each
  // other's effects.
  std::shared_ptr<net::Channel> AnyWorker() const { return workers_.Active().front().second; }
  template <typename Request>
  StatusOr<LookupResult> CallForEmbeddings(uint32_t worker, const Method<Request, Buffer>& method,
                                           const Request& request, Deadline deadline, bool as_rows);
  // The dtype asked for is the client's own: workers serve clients of different ones side by side.
  // Pooled slots may come as distinct rows, except with 16 bits a float.
  worker::LookupOptions Options(bool requires_grad, SlotMask slots) const {
    return {requires_grad, static_cast<uint32_t>(dtype_), slots,
            static_cast<uint32_t>(worker::EmbeddingsForm::kFewestBytes)};
  }

  // Null: no exact context has begun that has not ended.
  std::shared_ptr<ExactRows> Exact() const;
  StatusOr<ReturnReport> ReturnInOrder(ExactRows& rows, const BatchReference& reference,
                                       float scale, std::span<const SlotGradient> gradients,
                                       Deadline deadline);
  // Lookups without gradients see every update that the rank has made. `trains`: the lookup of
  // another context, whose update ExactRows would miss; kFailedPrecondition.
  Status AwaitExact(bool requires_grad, bool trains, Deadline deadline) const;
  // `call` changes rows by other means than updates.
  template <typename Call>
  Status ChangeRows(const char* what, Call call);

  const worker::WireDtype dtype_;
  mutable std::mutex exact_mutex_;
  std::shared_ptr<ExactRows> exact_;  // calls under way keep it
  uint32_t num_exact_ = 0;            // contexts that have begun and not ended
  uint32_t num_other_rows_ = 0;       // sections that have begun and not ended
  DurationStats lookup_times_{"client lookup"};
  DurationStats decode_times_{"client decode"};
  DurationStats return_times_{"client return gradients"};
  WorkerChannels workers_;
  DistinctBatches distinct_;
};

}  // namespace persia::client

#include "client/remote_client.h"

#include <algorithm>
#include <mutex>

#include "net/rpc.h"

namespace persia::client {
namespace {

constexpr uint32_t kMaxWorkers = 65536;  // bounds what one discovery message can make us allocate

std::shared_ptr<net::Channel> MakeChannel(uint32_t index) {
  const std::string peer = "embedding-worker " + std::to_string(index);
  return std::make_shared<net::Channel>(net::Channel::Options{.peer = peer});
}

}  // namespace

WorkerChannels::WorkerChannels(uint32_t num_workers) { GrowTo(num_workers, true); }

// Channels are made without an address: calls to them wait, and end by their deadlines.
// Discovery gives the indexes, so a worker may be known before those with smaller ones.
void WorkerChannels::GrowTo(uint32_t num_workers, bool active) {
  while (workers_.size() < num_workers) {
    workers_.push_back({MakeChannel(static_cast<uint32_t>(workers_.size())), active});
  }
}

Status WorkerChannels::Set(uint32_t index, const std::string& address) {
  if (index >= kMaxWorkers) {
    return InvalidArgument("worker_index ", index, ": at most ", kMaxWorkers,
                           " embedding workers are possible");
  }
  const std::unique_lock lock(mutex_);
  // Workers between may come later, or have left: nothing is asked of them until they are set.
  GrowTo(index + 1, false);
  workers_[index].active = true;
  workers_[index].channel->SetAddress(address);
  return Status::Ok();
}

// Its channel stays, for the batches that it holds.
void WorkerChannels::Retire(uint32_t index) {
  const std::unique_lock lock(mutex_);
  if (index < workers_.size()) workers_[index].active = false;
}

void WorkerChannels::Drop(uint32_t index) {
  std::shared_ptr<net::Channel> channel = MakeChannel(index);
  {
    const std::unique_lock lock(mutex_);
    if (index >= workers_.size()) return;
    workers_[index].channel.swap(channel);
    workers_[index].active = false;
  }
  channel->Close();  // calls that wait in it keep it alive
}

// A shared pointer, so that a worker may be dropped while another thread calls it.
StatusOr<std::shared_ptr<net::Channel>> WorkerChannels::At(uint32_t index) const {
  const std::shared_lock lock(mutex_);
  if (index < workers_.size()) return workers_[index].channel;
  return InvalidArgument("worker_index ", index, ": there are only ", workers_.size(),
                         " embedding workers, counted from 0");
}

// All of them when none takes new work: a call then fails with the peer's own error, which says
// more than an empty list.
std::vector<WorkerChannels::Link> WorkerChannels::Active() const {
  const std::shared_lock lock(mutex_);
  const bool any = std::any_of(workers_.begin(), workers_.end(),
                               [](const Worker& worker) { return worker.active; });
  std::vector<Link> links;
  for (uint32_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].active || !any) links.emplace_back(i, workers_[i].channel);
  }
  return links;
}

StatusOr<std::shared_ptr<RemoteClient>> RemoteClient::Create(uint32_t num_workers,
                                                             worker::WireDtype dtype) {
  if (num_workers == 0) {
    return InvalidArgument("num_workers: 0; at least one embedding worker is needed");
  }
  return std::shared_ptr<RemoteClient>(new RemoteClient(num_workers, dtype));
}

std::vector<net::ChannelStats> RemoteClient::channel_stats() const {
  std::vector<net::ChannelStats> stats;
  for (const auto& [index, channel] : workers_.Active()) stats.push_back(channel->stats());
  return stats;
}

// The reference must agree with what was asked: an embedding that expects a gradient stays in
// flight at the worker until it is returned, and one without would lose its gradient.
template <typename Request>
StatusOr<LookupResult> RemoteClient::CallForEmbeddings(uint32_t worker_index,
                                                       const Method<Request, Buffer>& method,
                                                       const Request& request, Deadline deadline,
                                                       bool as_rows) {
  Timed total(lookup_times_);
  PERSIA_ASSIGN_OR_RETURN(const auto channel, workers_.At(worker_index));
  PERSIA_ASSIGN_OR_RETURN(Buffer message, net::Call(*channel, method, request, deadline));
  Timed decoding(decode_times_);
  auto result = worker::DecodeEmbeddings(worker_index, std::move(message), as_rows);
  if (!result.ok()) return net::AboutMessage(channel->peer(), result.status());
  total.set_reference(result->reference.reference);
  decoding.set_reference(result->reference.reference);
  // A worker of our version never answers otherwise; the check guards what would be lost silently.
  const bool requires_grad = request.options.requires_grad == 1;
  if (requires_grad == (result->reference.reference != 0)) return result;
  return Corruption(channel->peer(),
                    requires_grad ? ": embeddings without a reference to return gradients to"
                                  : ": embeddings that expect gradients, which were not asked for");
}

// To every worker: each configures the servers that restart.
Status RemoteClient::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  const auto exact = Exact();
  // The same one goes to a worker that joins: a loop with updates on their way need not pause.
  const bool is_other = exact != nullptr && !exact->HasConfig(config);
  if (is_other) PERSIA_RETURN_IF_ERROR(exact->WaitApplied(deadline));
  const auto links = workers_.Active();  // keeps the channels
  std::vector<net::Channel*> channels;
  for (const auto& [index, channel] : links) channels.push_back(channel.get());
  PERSIA_RETURN_IF_ERROR(
      net::CallAll(worker::kConfigureWorker, std::span<net::Channel* const>(channels),
                   std::vector(channels.size(), ConfigureRequest{config, replace}), deadline)
          .status());
  return is_other ? exact->Configure(config) : Status::Ok();
}

StatusOr<LookupResult> RemoteClient::Lookup(const BatchReference& reference, bool requires_grad,
                                            Deadline deadline, SlotMask slots, bool as_rows) {
  PERSIA_RETURN_IF_ERROR(AwaitExact(requires_grad, /*trains=*/requires_grad, deadline));
  const worker::LookupReferenceRequest request{reference, Options(requires_grad, slots)};
  auto result = CallForEmbeddings(reference.worker_index, worker::kLookupReference, request,
                                  deadline, as_rows);
  if (!result.ok()) return result;
  const BatchKey& answered = result->reference;
  // Without requires_grad the message has no reference to compare.
  if (answered.worker_incarnation == reference.worker_incarnation &&
      (!requires_grad || answered.reference == reference.reference)) {
    if (requires_grad) distinct_.Keep(result->reference, std::move(result->distinct));
    return result;
  }
  return Corruption("embedding-worker ", reference.worker_index, ": embeddings of another batch");
}

StatusOr<LookupResult> RemoteClient::LookupDirect(uint32_t worker_index,
                                                  std::span<const std::byte> id_features,
                                                  bool requires_grad, Deadline deadline,
                                                  SlotMask slots, const BatchReference& original,
                                                  bool as_rows) {
  const worker::LookupDirectRequest request{Options(requires_grad, slots), original, id_features};
  const bool is_moved = original.reference != 0;
  PERSIA_RETURN_IF_ERROR(AwaitExact(requires_grad, requires_grad && !is_moved, deadline));
  if (is_moved) distinct_.Forget(original);
  const auto links = workers_.Active();
  auto result = CallForEmbeddings(links[worker_index % links.size()].first, worker::kLookupDirect,
                                  request, deadline, as_rows);
  if (!result.ok() || !requires_grad) return result;
  if (const auto exact = Exact()) {
    exact->Rename(original, result->reference);  // and its sums are made there
  } else {
    distinct_.Keep(result->reference, std::move(result->distinct));
  }
  return result;
}

StatusOr<ReturnReport> RemoteClient::ReturnGradients(const BatchReference& reference, float scale,
                                                     std::span<const SlotGradient> gradients,
                                                     Deadline deadline) {
  if (const auto exact = Exact()) {
    return ReturnInOrder(*exact, reference, scale, gradients, deadline);
  }
  const Timed timed(return_times_, reference.reference);
  PERSIA_ASSIGN_OR_RETURN(const auto channel, workers_.At(reference.worker_index));
  SentGradients sent = SumDistinct(gradients, distinct_.Find(reference), scale);
  worker::GradientsRequest request{reference, scale, dtype_, std::move(sent.slots)};
  auto report = net::Call(*channel, worker::kReturnGradients, std::move(request), deadline);
  // Any other failure may be followed by a repetition or a release.
  if (report.ok() || report.code() == StatusCode::kNotFound) distinct_.Forget(reference);
  return report;
}

Status RemoteClient::Release(const BatchReference& reference, Deadline deadline) {
  distinct_.Forget(reference);
  const auto exact = Exact();
  const Status lost = exact == nullptr ? Status::Ok() : exact->End(reference);
  PERSIA_ASSIGN_OR_RETURN(const auto channel, workers_.At(reference.worker_index));
  const Status released =
      net::Call(*channel, worker::kReleaseReference, BatchKey(reference), deadline);
  return lost.ok() ? released : lost;
}

template <typename Call>
Status RemoteClient::ChangeRows(const char* what, Call call) {
  const auto exact = Exact();
  if (exact != nullptr) PERSIA_RETURN_IF_ERROR(exact->BeginOtherRows(what));
  const Status status = call();
  if (exact != nullptr) exact->EndOtherRows();
  return status;
}

Status RemoteClient::SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs,
                                   std::span<const float> rows, Deadline deadline) {
  // Refused here rather than by the far end, where the numbers would no longer be the caller's.
  if (signs.size() > UINT32_MAX || rows.size() != signs.size() * dim) {
    return InvalidArgument("rows: ", rows.size(), " floats for ", signs.size(), " signs of dim ",
                           dim, "; dim floats are needed for each of at most 2^32 - 1 signs");
  }
  const SignBlock block{dim, static_cast<uint32_t>(signs.size())};
  const SetRowsRequest request{{{&block, 1}, signs}, rows};
  return ChangeRows("rows were set", [&] {
    return net::Call(*AnyWorker(), worker::kSetEmbeddings, request, deadline);
  });
}

Status RemoteClient::Clear(Deadline deadline) {
  return ChangeRows("rows were cleared", [&] {
    return net::Call(*AnyWorker(), worker::kClearEmbeddings, Empty(), deadline);
  });
}

StatusOr<std::vector<uint64_t>> RemoteClient::Sizes(Deadline deadline) {
  return net::Call(*AnyWorker(), worker::kCountEmbeddings, Empty(), deadline);
}

}  // namespace persia::client

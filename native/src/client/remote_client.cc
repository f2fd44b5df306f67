#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/row_protocol.h"
#include "client/embedding_client.h"
#include "client/worker_channels.h"
#include "worker/fan_out.h"
#include "worker/gradients_codec.h"
#include "worker/worker_protocol.h"

namespace persia::client {
namespace {

using net::Method;
using net::Parts;

std::string PeerName(uint32_t index) { return "embedding-worker " + std::to_string(index); }

// What a worker answered does not decode; the message says which worker.
Status BadReply(uint32_t worker, const Status& status) {
  return {status.code(), PeerName(worker) + ": " + status.message()};
}

worker::ReferenceBody ToBody(const BatchReference& reference) {
  return {reference.worker_incarnation, reference.reference};
}

template <typename T>
Parts FixedParts(const T& value) {
  Parts parts;
  parts.AddOwned(worker::EncodeFixed(value));
  return parts;
}

StatusOr<std::vector<uint64_t>> DecodeSizes(std::span<const std::byte> body) {
  ByteReader reader(body);
  const auto head = reader.Get<worker::WorkerStatsHead>();
  const auto rows = reader.GetArray<uint64_t>(head.num_servers);
  if (!reader.ok() || reader.remaining() != 0) {
    return Corruption("a WorkerStats reply of " + std::to_string(body.size()) +
                      " bytes is truncated or has bytes left over");
  }
  return std::vector<uint64_t>(rows.begin(), rows.end());
}

// Refused here rather than by the far end, where the numbers would no longer be the caller's.
Status CheckRows(uint32_t dim, size_t num_signs, size_t num_floats) {
  if (num_signs <= UINT32_MAX && num_floats == num_signs * dim) return Status::Ok();
  return InvalidArgument("rows: " + std::to_string(num_floats) + " floats for " +
                         std::to_string(num_signs) + " signs of dim " + std::to_string(dim) +
                         "; dim floats are needed for each of at most 2^32 - 1 signs");
}

// Batches go to the worker that holds them. What concerns the servers goes through one worker, for
// each reaches all servers; the configuration goes to every worker, for each keeps it to configure
// servers that restart.
class ChannelClient final : public RemoteClient {
 public:
  ChannelClient(uint32_t num_workers, worker::WireDtype dtype)
      : dtype_(dtype), workers_(num_workers) {}

  Status SetWorker(uint32_t index, const std::string& address) override {
    return workers_.Set(index, address);
  }
  void RetireWorker(uint32_t index) override { workers_.Retire(index); }
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline) override;
  StatusOr<LookupResult> Lookup(const BatchReference& reference, bool requires_grad,
                                Deadline deadline, LookupParts parts) override;
  StatusOr<LookupResult> LookupDirect(uint32_t worker_index, std::span<const std::byte> id_features,
                                      bool requires_grad, Deadline deadline,
                                      LookupParts parts) override;
  StatusOr<ReturnReport> ReturnGradients(const BatchReference& reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline) override;
  Status Release(const BatchReference& reference, Deadline deadline) override;
  Status SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs, std::span<const float> rows,
                       Deadline deadline) override;
  Status Clear(Deadline deadline) override;
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) override;
  std::vector<net::ChannelStats> channel_stats() const override;
  std::vector<const DurationStats*> durations() const override {
    return {&lookup_times_, &decode_times_, &return_times_};
  }

 private:
  // The worker for what concerns the servers.
  uint32_t AnyWorker() const { return workers_.Active().front().first; }
  // For methods whose reply has no body.
  Status CallForNothing(uint32_t worker, Method method, const Parts& parts, Deadline deadline);
  StatusOr<LookupResult> CallForEmbeddings(uint32_t worker, Method method, const Parts& parts,
                                           bool requires_grad, Deadline deadline);

  uint32_t dtype_number() const { return static_cast<uint32_t>(dtype_); }

  const worker::WireDtype dtype_;
  DurationStats lookup_times_{"client lookup"};
  DurationStats decode_times_{"client decode"};
  DurationStats return_times_{"client return gradients"};
  WorkerChannels workers_;
};

Status ChannelClient::CallForNothing(uint32_t worker, Method method, const Parts& parts,
                                     Deadline deadline) {
  auto channel = workers_.At(worker);
  if (!channel.ok()) return channel.status();
  auto reply = channel.value()->Call(method, parts, deadline);
  if (!reply.ok()) return reply.status();
  const Status empty = worker::RequireEmpty(reply->span(), "a reply");
  return empty.ok() ? empty : BadReply(worker, empty);
}

StatusOr<LookupResult> ChannelClient::CallForEmbeddings(uint32_t worker, Method method,
                                                        const Parts& parts, bool requires_grad,
                                                        Deadline deadline) {
  Timed total(lookup_times_);
  auto channel = workers_.At(worker);
  if (!channel.ok()) return channel.status();
  auto reply = channel.value()->Call(method, parts, deadline);
  if (!reply.ok()) return reply.status();
  Timed decoding(decode_times_);
  auto result = DecodeEmbeddings(worker, std::move(reply).value());
  if (result.ok()) {
    total.set_reference(result->reference.reference);
    decoding.set_reference(result->reference.reference);
  }
  if (!result.ok()) return BadReply(worker, result.status());
  if (requires_grad != (result->reference.reference != 0)) {
    return BadReply(
        worker, Corruption(requires_grad ? "embeddings without a reference to return gradients to"
                                         : "embeddings that expect gradients nobody will return"));
  }
  return result;
}

Status ChannelClient::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  const auto body = EncodeConfigureRequest(config, replace);
  std::vector<worker::OutgoingCall> calls;
  const auto links = workers_.Active();
  for (const auto& [index, channel] : links) {
    calls.push_back({channel.get(), {}});
    calls.back().parts.AddView(body);
  }
  return worker::FirstFailure(
      worker::CallAll(Method::kConfigureWorker, std::move(calls), deadline));
}

StatusOr<LookupResult> ChannelClient::Lookup(const BatchReference& reference, bool requires_grad,
                                             Deadline deadline, LookupParts parts) {
  const worker::LookupReferenceBody body{ToBody(reference), requires_grad, dtype_number(), parts};
  auto result = CallForEmbeddings(reference.worker_index, Method::kLookupReference,
                                  FixedParts(body), requires_grad, deadline);
  if (!result.ok()) return result;
  const BatchReference& answered = result->reference;
  if (answered.worker_incarnation != reference.worker_incarnation ||
      (requires_grad && answered.reference != reference.reference)) {
    return BadReply(reference.worker_index, Corruption("embeddings of another batch"));
  }
  return result;
}

StatusOr<LookupResult> ChannelClient::LookupDirect(uint32_t worker_index,
                                                   std::span<const std::byte> id_features,
                                                   bool requires_grad, Deadline deadline,
                                                   LookupParts parts) {
  Parts request = FixedParts(worker::LookupDirectHead{requires_grad, dtype_number(), parts});
  request.AddView(id_features);
  const auto links = workers_.Active();
  return CallForEmbeddings(links[worker_index % links.size()].first, Method::kLookupDirect, request,
                           requires_grad, deadline);
}

StatusOr<ReturnReport> ChannelClient::ReturnGradients(const BatchReference& reference, float scale,
                                                      std::span<const SlotGradient> gradients,
                                                      Deadline deadline) {
  const Timed timed(return_times_, reference.reference);
  auto channel = workers_.At(reference.worker_index);
  if (!channel.ok()) return channel.status();
  const Parts parts = worker::EncodeGradients({reference.worker_incarnation, reference.reference},
                                              scale, gradients, dtype_);
  auto reply = channel.value()->Call(Method::kReturnGradients, parts, deadline);
  if (!reply.ok()) return reply.status();
  auto report = worker::DecodeReport(reply->span());
  return report.ok() ? report : BadReply(reference.worker_index, report.status());
}

Status ChannelClient::Release(const BatchReference& reference, Deadline deadline) {
  return CallForNothing(reference.worker_index, Method::kReleaseReference,
                        FixedParts(ToBody(reference)), deadline);
}

Status ChannelClient::SetEmbeddings(uint32_t dim, std::span<const uint64_t> signs,
                                    std::span<const float> rows, Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckRows(dim, signs.size(), rows.size()));
  const RowBlockHeader block{dim, static_cast<uint32_t>(signs.size())};
  Parts parts;
  parts.AddOwned(EncodeSetRowsHead(std::span(&block, 1)));
  parts.AddView(std::as_bytes(signs));
  parts.AddView(std::as_bytes(rows));
  parts.AddView(ArrayPadding(rows.size_bytes()));
  return CallForNothing(AnyWorker(), Method::kSetEmbeddings, parts, deadline);
}

Status ChannelClient::Clear(Deadline deadline) {
  return CallForNothing(AnyWorker(), Method::kClearEmbeddings, {}, deadline);
}

StatusOr<std::vector<uint64_t>> ChannelClient::Sizes(Deadline deadline) {
  const auto [worker, channel] = workers_.Active().front();
  auto reply = channel->Call(Method::kWorkerStats, {}, deadline);
  if (!reply.ok()) return reply.status();
  auto sizes = DecodeSizes(reply->span());
  return sizes.ok() ? sizes : BadReply(worker, sizes.status());
}

std::vector<net::ChannelStats> ChannelClient::channel_stats() const {
  std::vector<net::ChannelStats> stats;
  for (const auto& [worker, channel] : workers_.Active()) stats.push_back(channel->stats());
  return stats;
}

}  // namespace

StatusOr<std::shared_ptr<RemoteClient>> RemoteClient::Create(uint32_t num_workers,
                                                             worker::WireDtype dtype) {
  if (num_workers == 0) {
    return InvalidArgument("num_workers: 0; at least one embedding worker is needed");
  }
  return std::shared_ptr<RemoteClient>(std::make_shared<ChannelClient>(num_workers, dtype));
}

}  // namespace persia::client

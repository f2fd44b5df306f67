#include "worker/worker_service.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/row_protocol.h"
#include "worker/gradients_codec.h"
#include "worker/narrow_embeddings.h"
#include "worker/worker_protocol.h"

namespace persia::worker {
namespace {

using net::CallContext;
using net::Method;
using net::Parts;
using Body = std::span<const std::byte>;
using Reply = StatusOr<Parts>;

Reply EmptyReply(const Status& status) {
  PERSIA_RETURN_IF_ERROR(status);
  return Parts();
}

template <typename T>
Parts FixedReply(const T& value) {
  Parts parts;
  parts.AddOwned(EncodeFixed(value));
  return parts;
}

StatusOr<bool> ToBool(uint32_t requires_grad) {
  if (requires_grad <= 1) return requires_grad == 1;
  return InvalidArgument("requires_grad is " + std::to_string(requires_grad) +
                         "; it must be 0 or 1");
}

// The worker's answer, with 16 bits a float where the request asks for them.
Reply WithDtype(StatusOr<Parts> embeddings, WireDtype dtype) {
  if (!embeddings.ok() || dtype == WireDtype::kFloat32) return embeddings;
  auto narrow = NarrowEmbeddings(embeddings->views[0], dtype);
  if (!narrow.ok()) return narrow.status();
  Parts parts;
  parts.AddOwned(std::move(narrow).value());
  return parts;
}

Reference ToReference(const ReferenceBody& body) {
  return {body.worker_incarnation, body.reference};
}

// By when the worker must have its servers' answers: a tenth before the caller stops waiting, so
// that an error that names the parameter server still reaches it.
Deadline BeforeTheCallers(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - net::Clock::now());
  const auto tenth = std::clamp(left / 10, milliseconds(20), milliseconds(1000));
  return deadline - std::min(tenth, left / 2);
}

}  // namespace

// One handler for each method; they run concurrently on the RPC server's threads, and each gives
// the worker a little less time than its caller gave it.
class WorkerService::Impl {
 public:
  Impl(std::shared_ptr<EmbeddingWorker> worker, net::Server::Options options)
      : worker_(std::move(worker)), rpc_(std::move(options)) {
    Register(Method::kConfigureWorker, &Impl::Configure);
    Register(Method::kRegisterBatch, &Impl::RegisterBatch);
    Register(Method::kLookupReference, &Impl::LookupReference);
    Register(Method::kLookupDirect, &Impl::LookupDirect);
    Register(Method::kReturnGradients, &Impl::ReturnGradients);
    Register(Method::kReleaseReference, &Impl::ReleaseReference);
    Register(Method::kWorkerStats, &Impl::Stats);
    Register(Method::kClearEmbeddings, &Impl::ClearEmbeddings);
    Register(Method::kSetEmbeddings, &Impl::SetEmbeddings);
  }

  net::Server& rpc() { return rpc_; }

 private:
  void Register(Method method, Reply (Impl::*handle)(Body, Deadline)) {
    rpc_.Handle(method, [this, handle](const Buffer& request, const CallContext& context) {
      return (this->*handle)(request.span(), BeforeTheCallers(context.deadline));
    });
  }

  Reply Configure(Body body, Deadline deadline);
  Reply RegisterBatch(Body body, Deadline deadline);
  Reply LookupReference(Body body, Deadline deadline);
  Reply LookupDirect(Body body, Deadline deadline);
  Reply ReturnGradients(Body body, Deadline deadline);
  Reply ReleaseReference(Body body, Deadline deadline);
  Reply Stats(Body body, Deadline deadline);
  Reply ClearEmbeddings(Body body, Deadline deadline);
  Reply SetEmbeddings(Body body, Deadline deadline);

  const std::shared_ptr<EmbeddingWorker> worker_;
  net::Server rpc_;  // last: destroyed first, so that no handler outlives what it uses
};

Reply WorkerService::Impl::Configure(Body body, Deadline deadline) {
  auto request = DecodeConfigureRequest(body);
  if (!request.ok()) return request.status();
  return EmptyReply(worker_->Configure(request->config, request->replace, deadline));
}

Reply WorkerService::Impl::RegisterBatch(Body body, Deadline) {
  Body id_features;
  auto head = DecodeHead<RegisterBatchHead>(body, "a RegisterBatch request", &id_features);
  if (!head.ok()) return head.status();
  auto reference = worker_->Register(head->loader_index, id_features);
  if (!reference.ok()) return reference.status();
  return FixedReply(ReferenceBody{reference->incarnation, reference->counter});
}

Reply WorkerService::Impl::LookupReference(Body body, Deadline deadline) {
  auto request = DecodeFixed<LookupReferenceBody>(body, "a LookupReference request");
  if (!request.ok()) return request.status();
  auto requires_grad = ToBool(request->requires_grad);
  if (!requires_grad.ok()) return requires_grad.status();
  auto dtype = ToWireDtype(request->wire_dtype);
  if (!dtype.ok()) return dtype.status();
  return WithDtype(
      worker_->Lookup(ToReference(request->reference), *requires_grad, deadline, request->parts),
      *dtype);
}

Reply WorkerService::Impl::LookupDirect(Body body, Deadline deadline) {
  Body id_features;
  auto head = DecodeHead<LookupDirectHead>(body, "a LookupDirect request", &id_features);
  if (!head.ok()) return head.status();
  auto requires_grad = ToBool(head->requires_grad);
  if (!requires_grad.ok()) return requires_grad.status();
  auto dtype = ToWireDtype(head->wire_dtype);
  if (!dtype.ok()) return dtype.status();
  return WithDtype(worker_->LookupDirect(id_features, *requires_grad, deadline, head->parts),
                   *dtype);
}

Reply WorkerService::Impl::ReturnGradients(Body body, Deadline deadline) {
  auto request = DecodeGradients(body);
  if (!request.ok()) return request.status();
  auto report =
      worker_->ReturnGradients(request->reference, request->scale, request->gradients, deadline);
  if (!report.ok()) return report.status();
  Parts parts;
  parts.AddOwned(EncodeReport(*report));
  return parts;
}

Reply WorkerService::Impl::ReleaseReference(Body body, Deadline) {
  auto request = DecodeFixed<ReferenceBody>(body, "a ReleaseReference request");
  if (!request.ok()) return request.status();
  return EmptyReply(worker_->Release(ToReference(*request)));
}

Reply WorkerService::Impl::Stats(Body body, Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(RequireEmpty(body, "a WorkerStats request"));
  auto sizes = worker_->Sizes(deadline);
  if (!sizes.ok()) return sizes.status();
  Parts parts = FixedReply(WorkerStatsHead{static_cast<uint32_t>(sizes->size()), 0});
  const auto rows = std::as_bytes(std::span(sizes.value()));
  parts.AddOwned(std::vector<std::byte>(rows.begin(), rows.end()));
  return parts;
}

Reply WorkerService::Impl::ClearEmbeddings(Body body, Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(RequireEmpty(body, "a ClearEmbeddings request"));
  return EmptyReply(worker_->Clear(deadline));
}

Reply WorkerService::Impl::SetEmbeddings(Body body, Deadline deadline) {
  auto request = DecodeSetRowsRequest(body);
  if (!request.ok()) return request.status();
  std::vector<ServerBlocks::Block> blocks;
  for (const RowBlockHeader& block : request->blocks.blocks) {
    blocks.push_back({block.dim, block.num_signs});
  }
  return EmptyReply(worker_->SetEmbeddings(blocks, request->blocks.signs, request->rows, deadline));
}

WorkerService::WorkerService(std::shared_ptr<EmbeddingWorker> worker, net::Server::Options options)
    : impl_(std::make_unique<Impl>(std::move(worker), std::move(options))) {}
WorkerService::~WorkerService() = default;
StatusOr<uint16_t> WorkerService::Start() { return impl_->rpc().Start(); }
void WorkerService::Stop(std::chrono::milliseconds timeout) { impl_->rpc().Stop(timeout); }
net::ServerStats WorkerService::stats() const { return impl_->rpc().stats(); }
std::vector<const DurationStats*> WorkerService::durations() const {
  return impl_->rpc().durations();
}

}  // namespace persia::worker

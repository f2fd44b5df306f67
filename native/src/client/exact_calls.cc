// The calls of RemoteClient for consistency="exact": they connect ExactRows with the workers.
#include <utility>

#include "client/remote_client.h"
#include "net/rpc.h"
#include "worker/exact_protocol.h"

namespace persia::client {

Status RemoteClient::BeginExact(std::unique_ptr<ExactRows> rows) {
  if (dtype_ != worker::WireDtype::kFloat32) {
    return InvalidArgument(
        "consistency='exact' with 16 bits a float on the wire: set PERSIA_WIRE_DTYPE to float32, "
        "or "
        "use another mode");
  }
  if (exact_ != nullptr) return exact_.load()->CheckIdle("an exact context was begun");
  exact_rows_ = std::move(rows);
  exact_ = exact_rows_.get();
  return Status::Ok();
}

StatusOr<LookupResult> RemoteClient::LookupWhole(const BatchReference& reference,
                                                 std::span<const std::byte> id_features,
                                                 Deadline deadline) {
  if (exact_ == nullptr) return FailedPrecondition("BeginExact comes before LookupWhole");
  const Timed total(lookup_times_, reference.reference);
  ExactRows& rows = *exact_.load();
  worker::LookupWholeRequest request;
  request.key = reference;
  PERSIA_ASSIGN_OR_RETURN(const ExactRows::BatchPtr batch, rows.Begin(id_features, &request));
  uint32_t worker_index = reference.worker_index;
  if (reference.reference == 0) {
    const auto links = workers_.Active();
    worker_index = links[worker_index % links.size()].first;
    request.id_features = id_features;
  }
  const auto call = [&]() -> StatusOr<worker::WholeRows> {
    PERSIA_ASSIGN_OR_RETURN(const auto channel, workers_.At(worker_index));
    return net::Call(*channel, worker::kLookupWhole, request, deadline);
  };
  auto answer = call();
  if (!answer.ok()) {
    rows.Abandon(batch);
    return answer.status();
  }
  const Timed decoding(decode_times_, reference.reference);
  return rows.Arrive(batch, worker_index, *answer);
}

StatusOr<LookupResult> RemoteClient::PoolExact(const BatchReference& reference) {
  if (exact_ == nullptr) return FailedPrecondition("BeginExact comes before PoolExact");
  return exact_.load()->Pool(reference);
}

Status RemoteClient::ApplyExact(const BatchReference& reference, float scale,
                                std::span<const SlotGradient> gradients) {
  if (exact_ == nullptr) return FailedPrecondition("BeginExact comes before ApplyExact");
  return exact_.load()->Apply(reference, scale, gradients);
}

void RemoteClient::FailExact(const BatchReference& reference, const std::string& what) {
  if (exact_ != nullptr) {
    exact_.load()->Fail(reference, FailedPrecondition("an update was lost: ", what));
  }
}

Status RemoteClient::CheckExactIdle(const std::string& what) const {
  return exact_ == nullptr ? Status::Ok() : exact_.load()->CheckIdle(what.c_str());
}

StatusOr<ReturnReport> RemoteClient::ReturnInOrder(const BatchReference& reference, float scale,
                                                   std::span<const SlotGradient> gradients,
                                                   Deadline deadline) {
  ExactRows& rows = *exact_.load();
  PERSIA_ASSIGN_OR_RETURN(ExactRows::Outgoing outgoing,
                          rows.PrepareReturn(reference, gradients, deadline));
  const Timed timed(return_times_, reference.reference);
  PERSIA_ASSIGN_OR_RETURN(const auto channel, workers_.At(reference.worker_index));
  worker::OrderedGradientsRequest request{
      outgoing.after, {reference, scale, dtype_, std::move(outgoing.gradients), {}}};
  auto report = net::Call(*channel, worker::kReturnInOrder, std::move(request), deadline);
  if (report.ok()) PERSIA_RETURN_IF_ERROR(rows.Finish(reference, *report));
  return report;
}

Status RemoteClient::WaitApplied(bool requires_grad, Deadline deadline) {
  if (requires_grad || exact_ == nullptr) return Status::Ok();
  return exact_.load()->WaitApplied(deadline);
}

}  // namespace persia::client

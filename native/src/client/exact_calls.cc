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
        "or use another mode");
  }
  const std::lock_guard lock(exact_mutex_);
  // The rows that it would fetch may be those of before.
  if (num_other_rows_ > 0) {
    return FailedPrecondition(
        "consistency='exact' while another context sets, clears or loads rows: begin it "
        "afterwards");
  }
  if (num_exact_ > 0) PERSIA_RETURN_IF_ERROR(exact_->CheckIdle("an exact context was begun"));
  if (num_exact_++ == 0) exact_ = std::move(rows);
  return Status::Ok();
}

void RemoteClient::EndExact() {
  const std::lock_guard lock(exact_mutex_);
  if (num_exact_ == 0 || --num_exact_ > 0) return;
  exact_->EndContext();  // it stays for its metrics
}

// A copy of the pointer, so that calls in progress keep the rows while another thread ends the
// context.
std::shared_ptr<ExactRows> RemoteClient::Exact() const {
  const std::lock_guard lock(exact_mutex_);
  return num_exact_ > 0 ? exact_ : nullptr;
}

std::shared_ptr<const ExactRows> RemoteClient::exact_rows() const {
  const std::lock_guard lock(exact_mutex_);
  return exact_;
}

StatusOr<LookupResult> RemoteClient::LookupWhole(const BatchReference& reference,
                                                 std::span<const std::byte> id_features,
                                                 Deadline deadline) {
  const auto exact = Exact();
  if (exact == nullptr) return FailedPrecondition("BeginExact comes before LookupWhole");
  const Timed total(lookup_times_, reference.reference);
  ExactRows& rows = *exact;
  worker::LookupWholeRequest request;
  request.key = reference;
  PERSIA_ASSIGN_OR_RETURN(const ExactRows::BatchPtr batch,
                          rows.Begin(id_features, &request, deadline));
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
  while (answer.ok() && rows.AsksAgain(*batch, *answer, &request)) answer = call();
  if (!answer.ok()) {
    rows.Abandon(batch);
    return answer.status();
  }
  const Timed decoding(decode_times_, reference.reference);
  return rows.Arrive(batch, worker_index, *answer);
}

StatusOr<LookupResult> RemoteClient::PoolExact(const BatchReference& reference) {
  if (const auto exact = Exact()) return exact->Pool(reference);
  return FailedPrecondition("BeginExact comes before PoolExact");
}

Status RemoteClient::ApplyExact(const BatchReference& reference, float scale,
                                std::span<const SlotGradient> gradients) {
  if (const auto exact = Exact()) return exact->Apply(reference, scale, gradients);
  return FailedPrecondition("BeginExact comes before ApplyExact");
}

void RemoteClient::FailExact(const BatchReference& reference, const std::string& what) {
  if (const auto exact = Exact()) {
    exact->Fail(reference, FailedPrecondition("an update was lost: ", what));
  }
}

// Counted before the rows are asked: an exact context that begins in between sees the count, and is
// refused (BeginExact), so neither order of the two misses the other.
Status RemoteClient::BeginOtherRows(const std::string& what) {
  {
    const std::lock_guard lock(exact_mutex_);
    ++num_other_rows_;
  }
  const auto exact = Exact();
  Status status = exact == nullptr ? Status::Ok() : exact->BeginOtherRows(what.c_str());
  if (!status.ok()) {
    const std::lock_guard lock(exact_mutex_);
    --num_other_rows_;
  }
  return status;
}

void RemoteClient::EndOtherRows() {
  if (const auto exact = Exact()) exact->EndOtherRows();
  const std::lock_guard lock(exact_mutex_);
  --num_other_rows_;
}

StatusOr<ReturnReport> RemoteClient::ReturnInOrder(ExactRows& rows, const BatchReference& reference,
                                                   float scale,
                                                   std::span<const SlotGradient> gradients,
                                                   Deadline deadline) {
  // Before the wait for earlier updates, in which a dead worker may be forgotten: its channel then
  // says that the worker has gone, and the batch moves to another one.
  PERSIA_ASSIGN_OR_RETURN(const auto channel, workers_.At(reference.worker_index));
  PERSIA_ASSIGN_OR_RETURN(ExactRows::Outgoing outgoing,
                          rows.PrepareReturn(reference, gradients, deadline));
  const Timed timed(return_times_, reference.reference);
  worker::OrderedGradientsRequest request{
      outgoing.after, {reference, scale, dtype_, std::move(outgoing.gradients), {}}};
  auto report = net::Call(*channel, worker::kReturnInOrder, std::move(request), deadline);
  if (report.ok()) PERSIA_RETURN_IF_ERROR(rows.Finish(reference, *report));
  return report;
}

Status RemoteClient::AwaitExact(bool requires_grad, bool trains, Deadline deadline) const {
  const auto exact = Exact();
  if (exact == nullptr) return Status::Ok();
  if (trains) {
    return FailedPrecondition(
        "a training lookup beside consistency='exact', whose held rows would miss its update: end "
        "the exact context first, or look up without gradients");
  }
  return requires_grad ? Status::Ok() : exact->WaitApplied(deadline);
}

}  // namespace persia::client

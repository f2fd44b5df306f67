// The second half of a batch's life in ExactRows: its update reaches the servers, in the order in
// which the rank has applied the updates, or the batch ends without one.
#include "client/exact_batch.h"
#include "client/exact_rows.h"

namespace persia::client {

using worker::BatchReference;
using worker::SlotGradient;

namespace {

bool IsSameWorker(const BatchReference& a, const BatchReference& b) {
  return a.worker_index == b.worker_index && a.worker_incarnation == b.worker_incarnation;
}

// The slot's sums, where they can be sent in the place of its gradients; they are finite.
void UseSums(const worker::LookupPlan& plan, std::span<const float* const> sum_of,
             SlotGradient* gradient) {
  for (const worker::PlannedFeature& feature : plan.features) {
    const worker::PlannedGroup& group = plan.groups[feature.group];
    if (feature.slot->name != gradient->slot || gradient->skipped) continue;
    if (!feature.slot->embedding_summation || group.num_features != 1) return;
    if (group.num_signs == 0) return;
    gradient->num_rows = group.num_signs;
    gradient->rows = sum_of[group.first_number];
    gradient->summed = true;
  }
}

}  // namespace

// Called by the threads that return gradients, in any order; this puts them in order. At most
// kMaxOrderedReturns are on their way, since each may block a handler of the worker until the one
// before it is applied.
StatusOr<ExactRows::Outgoing> ExactRows::PrepareReturn(const BatchReference& reference,
                                                       std::span<const SlotGradient> gradients,
                                                       worker::Deadline deadline) {
  Outgoing outgoing{.after = {}, .gradients = {gradients.begin(), gradients.end()}, .batch = {}};
  std::unique_lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(status_);
  if (!batches_.contains(KeyOf(reference))) {
    return FailedPrecondition("gradients of batch ", reference.reference,
                              ", which consistency='exact' does not hold: it was looked up in "
                              "another context, or has ended; train one context at a time");
  }
  PERSIA_ASSIGN_OR_RETURN(outgoing.batch, Find(reference));
  const Batch& batch = *outgoing.batch;
  if (batch.update == 0) return FailedPrecondition("the update was not applied at the rank first");
  // One that goes to another worker waits for the acknowledgement of the one before it.
  const auto may_be_sent = [&] {
    if (!status_.ok() || !unacknowledged_.contains(batch.update)) return true;
    if (batch.update >= unacknowledged_.begin()->first + worker::kMaxOrderedReturns) return false;
    const auto before = unacknowledged_.find(batch.update - 1);
    outgoing.after = {};
    if (before == unacknowledged_.end()) return true;
    outgoing.after = before->second->references.back();
    return IsSameWorker(before->second->references.back(), reference);
  };
  if (!changed_.wait_until(lock, deadline, may_be_sent)) {
    return DeadlineExceeded("the updates before that of batch ", reference.reference,
                            " were not acknowledged");
  }
  PERSIA_RETURN_IF_ERROR(status_);
  if (!batch.sums.nonfinite_features.empty()) return outgoing;  // the worker counts them
  for (SlotGradient& gradient : outgoing.gradients) UseSums(batch.plan, batch.sum_of, &gradient);
  return outgoing;
}

Status ExactRows::Finish(const BatchReference& reference, const worker::ReturnReport& report) {
  const std::lock_guard lock(mutex_);
  const auto found = batches_.find(KeyOf(reference));
  if (found == batches_.end()) return status_;
  const BatchPtr batch = found->second;
  if (report.update.num_missing > 0) {
    status_ =
        FailedPrecondition("parameter servers had no row for ", report.update.num_missing,
                           " gradients of batch ", reference.reference,
                           ", which consistency='exact' has replayed: they were started again, or "
                           "evict rows; load a checkpoint and begin a new context");
  }
  const Status status = status_;
  EndLocked(batch);
  return status;
}

void ExactRows::Fail(const BatchReference& reference, const Status& status) {
  const std::lock_guard lock(mutex_);
  const auto found = batches_.find(KeyOf(reference));
  if (found == batches_.end()) return;
  if (status_.ok()) status_ = status;
  const BatchPtr batch = found->second;
  EndLocked(batch);
}

// By a name of before it is only a copy at a worker that had seemed dead which ends.
Status ExactRows::End(const BatchReference& reference) {
  const std::lock_guard lock(mutex_);
  moved_.erase(KeyOf(reference));
  const auto found = batches_.find(KeyOf(reference));
  if (found == batches_.end()) return Status::Ok();
  const BatchPtr batch = found->second;
  if (KeyOf(batch->references.back()) != KeyOf(reference)) return Status::Ok();
  Status lost = Status::Ok();
  if (status_.ok() && unacknowledged_.contains(batch->update)) {
    lost = FailedPrecondition("batch ", reference.reference,
                              " was given up after consistency='exact' had replayed its update, "
                              "which the servers do not get: load a checkpoint and begin a new "
                              "context");
    status_ = lost;
  }
  EndLocked(batch);
  return lost;
}

// The rows are needed a while: a lookup that began before this acknowledgement may bring values
// that lack the update. They may be evicted once every such lookup has ended (Drain).
void ExactRows::EndLocked(const BatchPtr& batch) {
  unacknowledged_.erase(batch->update);
  for (const BatchReference& name : batch->references) {
    batches_.erase(KeyOf(name));
  }
  ended_.emplace_back(next_number_, batch);
  Drain();
  changed_.notify_all();
}

Status ExactRows::WaitApplied(worker::Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto is_over = [&] { return unacknowledged_.empty() || !status_.ok(); };
  if (changed_.wait_until(lock, deadline, is_over)) return status_;
  return DeadlineExceeded(unacknowledged_.size(), " updates were not acknowledged");
}

}  // namespace persia::client

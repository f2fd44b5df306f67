#include "worker/embedding_worker.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "worker/embeddings_message.h"
#include "worker/lookup_plan.h"
#include "worker/routed_rows.h"

namespace persia::worker {

namespace {

// A batch that is to be released while a request works on it is about to be returned or answered.
constexpr std::chrono::seconds kReleasePatience{10};

// Queued batches to prefetch: enough to hide the device's latency, few enough that their rows are
// not evicted before use.
constexpr uint64_t kBatchesAhead = 4;

std::vector<const float*> FindRows(const LookupPlan& plan, std::span<const ServerRows> answers,
                                   SlotMask slots) {
  std::vector<const float*> begins;
  for (const ServerRows& answer : answers) begins.push_back(answer.rows.data());
  std::vector<const float*> rows;
  if (slots == kAllSlots) {
    LocateRows(plan, std::move(begins), &rows);
  } else {
    LocateRows(plan, std::move(begins), &rows, SignsOfSlots{slots});
  }
  return rows;
}

uint64_t CountSignsOf(const LookupPlan& plan, SlotMask slots) {
  uint64_t num_signs = 0;
  for (const PlannedGroup& group : plan.groups) {
    if (Includes(slots, group.mode)) num_signs += group.num_signs;
  }
  return num_signs;
}

// Joins the servers' answers to one update. The staleness of a server's answer counts from the
// batch's first lookup there; that of a later lookup counts from its own stamp.
ReturnReport MakeReport(std::span<const UpdateResult> results,
                        std::span<const SlotsLookup> lookups) {
  ReturnReport report;
  for (const SlotsLookup& lookup : lookups) report.lookups.push_back({lookup.slots});
  for (size_t server = 0; server < results.size(); ++server) {
    const UpdateResult& result = results[server];
    report.update.staleness = std::max(report.update.staleness, result.staleness);
    report.update.num_updated += result.num_updated;
    report.update.num_missing += result.num_missing;
    const LookupStamp first = FirstStamp(lookups, server);
    for (size_t i = 0; i < lookups.size(); ++i) {
      const LookupStamp& stamp = lookups[i].stamps[server];
      // A server that has restarted between two lookups counts from 0 again.
      if (stamp.incarnation == 0 || stamp.incarnation != first.incarnation) continue;
      const uint64_t until = stamp.update_counter - first.update_counter;
      // Never below 0, whatever a server answers.
      const uint64_t staleness = result.staleness - std::min(result.staleness, until);
      report.lookups[i].staleness = std::max(report.lookups[i].staleness, staleness);
    }
  }
  return report;
}

// Routes the batch by the placement of the present servers. What was looked up at those of before
// dates nothing.
void RouteTo(const Placement& placement, Batch* batch) {
  if (batch->plan->placement == placement) return;
  Reroute(placement, &*batch->plan);
  for (SlotsLookup& lookup : batch->lookups) lookup.stamps.assign(placement.num_servers(), {});
}

// What is really sent: signs of slots without a usable gradient are left out.
uint64_t CountSigns(std::span<const ServerBlocks> requests) {
  uint64_t count = 0;
  for (const ServerBlocks& request : requests) count += request.signs.size();
  return count;
}

}  // namespace

StatusOr<std::unique_ptr<EmbeddingWorker>> EmbeddingWorker::Create(
    WorkerOptions options, std::shared_ptr<RowService> rows) {
  // Routing divides by it.
  if (rows->placement().num_servers() == 0) {
    return InvalidArgument(
        "num_servers is 0; an embedding worker needs at least 1 parameter server");
  }
  if (options.forward_buffer_size == 0 || options.max_in_flight == 0) {
    return InvalidArgument("forward_buffer_size and max_in_flight must be at least 1");
  }
  PERSIA_ASSIGN_OR_RETURN(SlotTable slots, SlotTable::Create(options.feature_index_prefix_bit,
                                                             std::move(options.slots)));
  return std::unique_ptr<EmbeddingWorker>(
      new EmbeddingWorker(options, std::move(slots), std::move(rows)));
}

EmbeddingWorker::EmbeddingWorker(const WorkerOptions& options, SlotTable slots,
                                 std::shared_ptr<RowService> rows)
    : slots_(std::move(slots)),
      rows_(std::move(rows)),
      table_({.max_waiting_per_loader = options.forward_buffer_size,
              .max_waiting_bytes = options.forward_buffer_bytes,
              .max_in_flight = options.max_in_flight,
              .expiry = options.buffered_data_expired}) {}

template <typename Call>
auto EmbeddingWorker::ForPresentServers(Call call) -> decltype(call(Placement())) {
  for (;;) {
    const Placement placement = rows_->placement();
    auto result = call(placement);
    if (result.ok() || rows_->placement() == placement) return result;
  }
}

template <typename Call>
auto EmbeddingWorker::WithConfiguration(Deadline deadline, Call call) -> decltype(call()) {
  auto result = call();
  if (result.code() != StatusCode::kFailedPrecondition) return result;
  std::optional<TrainConfig> config;
  {
    const std::lock_guard lock(config_mutex_);
    config = config_;
  }
  // Of inference, or before the first TrainCtx: the server was right to refuse.
  if (!config.has_value()) {
    return FailedPrecondition(
        "the embedding optimizer is not configured: enter a TrainCtx before training lookups");
  }
  PERSIA_RETURN_IF_ERROR(rows_->Configure(*config, /*replace=*/false, deadline));
  return call();
}

// Kept only once every server has it, so that a server that restarts never gets a config that was
// refused.
Status EmbeddingWorker::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  const TrainConfig full = slots_.WithGroups(config);
  PERSIA_RETURN_IF_ERROR(full.Validate());
  PERSIA_RETURN_IF_ERROR(ForPresentServers(
      [&](const Placement&) { return rows_->Configure(full, replace, deadline); }));
  // The update of a rank that has died must not change the rows that its successor loads.
  PERSIA_RETURN_IF_ERROR(table_.AwaitRequests(deadline));
  const std::lock_guard lock(config_mutex_);
  config_ = full;
  return Status::Ok();
}

// Copied: a batch waits longer than the caller's bytes live, and decoders want them aligned.
StatusOr<FeatureBatch> EmbeddingWorker::Decode(std::span<const std::byte> id_features) const {
  Buffer bytes(id_features.size());
  if (!id_features.empty()) std::memcpy(bytes.data(), id_features.data(), id_features.size());
  return FeatureBatch::Decode(std::move(bytes), slots_);
}

// References count from 1 in every life of a worker: without this, one of an earlier life would
// name another batch.
Status EmbeddingWorker::CheckIncarnation(const BatchKey& key) const {
  if (key.worker_incarnation == incarnation_) return Status::Ok();
  return NotFound("the embedding worker has restarted since batch ", key.reference,
                  " was registered: its batches are gone");
}

StatusOr<BatchKey> EmbeddingWorker::Register(uint32_t loader_index,
                                             std::span<const std::byte> id_features) {
  PERSIA_ASSIGN_OR_RETURN(const uint64_t counter, Add(loader_index, id_features));
  SendPrefetchHints();
  return BatchKey{incarnation_, counter};
}

StatusOr<uint64_t> EmbeddingWorker::Add(uint32_t loader_index,
                                        std::span<const std::byte> id_features) {
  Timed timed(register_times_);
  PERSIA_ASSIGN_OR_RETURN(FeatureBatch features, Decode(id_features));
  StatusOr<uint64_t> counter = table_.AddWaiting(loader_index, std::move(features));
  if (counter.ok()) timed.set_reference(*counter);
  return counter;
}

StatusOr<Buffer> EmbeddingWorker::Lookup(const BatchKey& key, bool requires_grad, Deadline deadline,
                                         SlotMask slots, EmbeddingsForm form) {
  PERSIA_RETURN_IF_ERROR(CheckIncarnation(key));
  PERSIA_ASSIGN_OR_RETURN(const auto guard, table_.Acquire(key.reference, deadline));
  if (requires_grad) PERSIA_RETURN_IF_ERROR(table_.StartFlight(guard));
  StatusOr<Buffer> message = LookupHeld(*guard, requires_grad, deadline, slots, form);
  // A failed lookup leaves the batch where it was, for a repetition.
  if (message.ok() && !requires_grad) table_.FinishReleased(guard);
  return message;
}

StatusOr<Buffer> EmbeddingWorker::LookupDirect(std::span<const std::byte> id_features,
                                               bool requires_grad, Deadline deadline,
                                               SlotMask slots, EmbeddingsForm form,
                                               const BatchKey& original) {
  PERSIA_ASSIGN_OR_RETURN(FeatureBatch features, Decode(id_features));
  PERSIA_ASSIGN_OR_RETURN(const auto guard, table_.AddInFlight(std::move(features)));
  guard->original = original;
  StatusOr<Buffer> message = LookupHeld(*guard, requires_grad, deadline, slots, form);
  // After a failure no caller knows the reference, so none could return or release the batch.
  if (!message.ok() || !requires_grad) table_.FinishReleased(guard);
  return message;
}

// Once a batch, for its prefetch hints or for its lookup, whichever comes first.
void EmbeddingWorker::Plan(Batch& batch) {
  if (batch.plan.has_value()) return;
  const Timed timed(preprocess_times_, batch.counter);
  thread_local LookupPlanner planner;  // keeps its tables from batch to batch
  batch.plan = planner.Make(*batch.features, slots_, rows_->placement(), &slot_counters_);
  batch.features.reset();
}

// The plans that this needs are made earlier, not twice.
void EmbeddingWorker::SendPrefetchHints() {
  if (!rows_->WantsPrefetch()) return;
  const TracedBatch other(TracedBatch::kNone);  // not of the batch whose call this is
  while (auto guard = table_.NextToPrefetch(kBatchesAhead)) {
    Plan(**guard);
    const HintReport report = rows_->Prefetch((*guard)->plan->placement, (*guard)->plan->requests);
    num_hinted_.Add(report.num_signs);
    num_hints_dropped_.Add(report.num_dropped);
  }
}

StatusOr<Buffer> EmbeddingWorker::LookupHeld(Batch& batch, bool requires_grad, Deadline deadline,
                                             SlotMask slots, EmbeddingsForm form) {
  const Timed total(total_times_, batch.counter);
  Plan(batch);
  PERSIA_ASSIGN_OR_RETURN(const auto answers, LookupRows(batch, requires_grad, deadline, slots));
  if (batch.lookups.empty()) CountLookup(batch);
  // Only what was looked up for training may be updated.
  if (requires_grad) NoteLookup(slots, answers, &batch.lookups);
  const Timed timed(postprocess_times_, batch.counter);
  return Pool(batch, answers, requires_grad, slots, form);
}

// As a whole, with its first lookup.
void EmbeddingWorker::CountLookup(const Batch& batch) {
  num_looked_up_.Add();
  num_ids_.Add(batch.plan->num_ids);
  num_signs_.Add(batch.plan->num_signs());
}

StatusOr<WholeRows> EmbeddingWorker::LookupWhole(const LookupWholeRequest& request,
                                                 Deadline deadline) {
  if (request.key.reference != 0) {
    PERSIA_RETURN_IF_ERROR(CheckIncarnation(request.key));
    PERSIA_ASSIGN_OR_RETURN(const auto guard, table_.Acquire(request.key.reference, deadline));
    PERSIA_RETURN_IF_ERROR(table_.StartFlight(guard));
    return LookupWholeHeld(*guard, request, deadline);
  }
  PERSIA_ASSIGN_OR_RETURN(FeatureBatch features, Decode(request.id_features));
  PERSIA_ASSIGN_OR_RETURN(const auto guard, table_.AddInFlight(std::move(features)));
  StatusOr<WholeRows> rows = LookupWholeHeld(*guard, request, deadline);
  if (!rows.ok()) table_.FinishReleased(guard);  // as in LookupDirect()
  return rows;
}

StatusOr<WholeRows> EmbeddingWorker::LookupWholeHeld(Batch& batch,
                                                     const LookupWholeRequest& request,
                                                     Deadline deadline) {
  const Timed total(total_times_, batch.counter);
  Plan(batch);
  if (request.wanted.size() != (batch.plan->num_signs() + 63) / 64) {
    return InvalidArgument(request.wanted.size(), " words of wanted signs, and the batch has ",
                           batch.plan->num_signs(),
                           " signs: rank and worker must have the same embedding config");
  }
  const auto is_wanted = [&](const PlannedGroup& group, uint32_t number) {
    return Includes(request.slots, group.mode) && request.Wants(number);
  };
  const auto look_up = [&](const Placement& placement) {
    RouteTo(placement, &batch);
    const std::vector<ServerBlocks> wanted = SelectRequests(*batch.plan, is_wanted);
    return WithConfiguration(deadline, [&] {
      const Timed timed(rpc_times_, batch.counter);
      return rows_->LookupWhole(placement, wanted, deadline);
    });
  };
  PERSIA_ASSIGN_OR_RETURN(std::vector<ServerRows> answers, ForPresentServers(look_up));
  if (batch.lookups.empty()) CountLookup(batch);
  NoteLookup(request.slots, answers, &batch.lookups);
  WholeRows rows;
  rows.key = {incarnation_, batch.counter};
  rows.placement = batch.plan->placement;
  for (ServerRows& answer : answers) {
    rows.incarnations.push_back(answer.stamp.incarnation);
    rows.rows.push_back(answer.rows);
    rows.storage.push_back(std::move(answer.storage));
  }
  return rows;
}

StatusOr<std::vector<ServerRows>> EmbeddingWorker::LookupRows(Batch& batch, bool requires_grad,
                                                              Deadline deadline, SlotMask slots) {
  return ForPresentServers([&](const Placement& placement) {
    RouteTo(placement, &batch);
    // Usually all slots are looked up at once, and the plan's requests are sent as they are.
    std::vector<ServerBlocks> some;
    if (slots != kAllSlots) some = SelectRequests(*batch.plan, SignsOfSlots{slots});
    return WithConfiguration(deadline, [&] {
      const Timed timed(rpc_times_, batch.counter);
      return rows_->Lookup(placement, slots == kAllSlots ? batch.plan->requests : some,
                           requires_grad, deadline);
    });
  });
}

StatusOr<Buffer> EmbeddingWorker::Pool(const Batch& batch, std::span<const ServerRows> answers,
                                       bool requires_grad, SlotMask slots, EmbeddingsForm form) {
  const LookupPlan& plan = *batch.plan;
  PERSIA_ASSIGN_OR_RETURN(
      EmbeddingsLayout layout,
      LayOutEmbeddings(plan, incarnation_, requires_grad ? batch.counter : 0, slots, form));
  const std::vector<const float*> rows = FindRows(plan, answers, slots);
  for (size_t i = 0; i < plan.features.size(); ++i) {
    if (!Includes(slots, plan.features[i].slot->mode)) continue;
    PoolFeature(plan.features[i], plan.batch_size, rows, layout.slots[i]);
  }
  CountAsRows(plan, layout);
  return std::move(layout.message);
}

void EmbeddingWorker::CountAsRows(const LookupPlan& plan, const EmbeddingsLayout& layout) {
  bytes_saved_.Add(layout.bytes_saved);
  for (size_t i = 0; i < layout.slots.size(); ++i) {
    if (!layout.slots[i].as_rows) continue;
    num_slots_as_rows_.Add();
    slot_counters_.SentAsRows(*plan.features[i].slot);
  }
}

StatusOr<ReturnReport> EmbeddingWorker::ReturnGradients(const BatchKey& key, float scale,
                                                        std::span<const SlotGradient> gradients,
                                                        Deadline deadline, const BatchKey& after) {
  PERSIA_RETURN_IF_ERROR(CheckIncarnation(key));
  if (after.reference != 0) PERSIA_RETURN_IF_ERROR(CheckIncarnation(after));
  // A repetition does not wait for a first try that waits for `after`: with both of them in
  // handlers, there could be none left for `after`.
  const bool has_turn = after.reference != 0;
  StatusOr<BatchTable::Guard> guard =
      table_.Acquire(key.reference, has_turn ? std::chrono::steady_clock::now() : deadline);
  // Looked up after the batch, so that a return that finishes in between is found.
  if (!guard.ok()) {
    const std::optional<ReturnReport> first = table_.FindReturned(key.reference);
    if (first.has_value()) return *first;
    if (has_turn && guard.status().code() == StatusCode::kDeadlineExceeded) {
      return Unavailable("another request works on batch ", key.reference, ": try again");
    }
    return guard.status();
  }
  StatusOr<ReturnReport> report = ReturnHeld(**guard, scale, gradients, deadline, after.reference);
  if (!report.ok()) return report;
  table_.FinishReturned(*guard, *report);
  SendPrefetchHints();  // one more has been looked up; and here no rank waits for what it takes
  return report;
}

// If a server fails the batch stays in flight, and the repeated return updates the others a second
// time: they recognise the key and do not apply it again.
StatusOr<ReturnReport> EmbeddingWorker::ReturnHeld(Batch& batch, float scale,
                                                   std::span<const SlotGradient> gradients,
                                                   Deadline deadline, uint64_t after) {
  if (batch.lookups.empty()) {
    return FailedPrecondition("batch ", batch.counter,
                              " was not looked up for training: there is nothing to update");
  }
  const Timed total(update_times_, batch.counter);
  const auto reduce = [&] {
    const Timed timed(reduce_times_, batch.counter);
    return ReduceGradients(*batch.plan, scale, gradients);
  };
  ReducedGradients reduced;
  uint64_t num_sent = 0;
  const auto update = [&](const Placement& placement) -> StatusOr<std::vector<UpdateResult>> {
    RouteTo(placement, &batch);
    PERSIA_ASSIGN_OR_RETURN(reduced, reduce());
    PERSIA_RETURN_IF_ERROR(table_.WaitReturned(after, deadline));
    num_sent = CountSigns(reduced.requests);
    if (num_sent == 0) return std::vector<UpdateResult>();
    return Update(batch, reduced, deadline);
  };
  PERSIA_ASSIGN_OR_RETURN(const std::vector<UpdateResult> results, ForPresentServers(update));
  const SlotMask looked_up = LookedUp(batch.lookups);
  std::erase_if(reduced.skipped_features, [&](uint32_t i) {
    return !Includes(looked_up, batch.plan->features[i].slot->mode);
  });
  ReturnReport report = MakeReport(results, batch.lookups);
  report.num_nonfinite_slots = static_cast<uint32_t>(reduced.nonfinite_features.size());
  report.num_skipped_slots = static_cast<uint32_t>(reduced.skipped_features.size());
  Count(batch, reduced, num_sent);
  return report;
}

StatusOr<std::vector<UpdateResult>> EmbeddingWorker::Update(const Batch& batch,
                                                            const ReducedGradients& reduced,
                                                            Deadline deadline) {
  const BatchKey key =
      batch.original.reference != 0 ? batch.original : BatchKey{incarnation_, batch.counter};
  std::vector<UpdateRowsRequest> updates;
  for (size_t server = 0; server < reduced.requests.size(); ++server) {
    updates.push_back({key, FirstStamp(batch.lookups, server), reduced.requests[server].view(),
                       reduced.gradients[server]});
  }
  return WithConfiguration(deadline, [&] {
    const Timed timed(update_rpc_times_, batch.counter);
    return rows_->Update(batch.plan->placement, updates, deadline);
  });
}

// After the update, so that a return that fails and is repeated counts once.
void EmbeddingWorker::Count(const Batch& batch, const ReducedGradients& reduced,
                            uint64_t num_sent) {
  num_nonfinite_slots_.Add(reduced.nonfinite_features.size());
  num_skipped_slots_.Add(reduced.skipped_features.size());
  const uint64_t num_signs = CountSignsOf(*batch.plan, LookedUp(batch.lookups));
  num_gradients_.Add(num_signs);
  num_gradients_left_out_.Add(num_signs - num_sent);
  const auto slot = [&](uint32_t feature) -> const SlotConfig& {
    return *batch.plan->features[feature].slot;
  };
  for (const uint32_t i : reduced.nonfinite_features) slot_counters_.Nonfinite(slot(i));
  for (const uint32_t i : reduced.skipped_features) slot_counters_.Skipped(slot(i));
}

Status EmbeddingWorker::Release(const BatchKey& key) {
  PERSIA_RETURN_IF_ERROR(CheckIncarnation(key));
  if (!table_.WasIssued(key.reference)) {
    return NotFound("batch ", key.reference, " was never registered");
  }
  const Deadline deadline = std::chrono::steady_clock::now() + kReleasePatience;
  StatusOr<BatchTable::Guard> guard = table_.Acquire(key.reference, deadline);
  if (guard.ok()) {
    table_.FinishReleased(*guard);
    return Status::Ok();
  }
  // Gone already: releasing twice is fine.
  return guard.status().code() == StatusCode::kNotFound ? Status::Ok() : guard.status();
}

Status EmbeddingWorker::SetEmbeddings(const SignBlocks& blocks, std::span<const float> rows,
                                      Deadline deadline) {
  uint64_t num_signs = 0;
  for (const SignBlock& block : blocks.blocks) num_signs += block.num_signs;
  if (num_signs != blocks.signs.size() || blocks.num_floats() != rows.size()) {
    return InvalidArgument("blocks of ", num_signs, " signs and ", blocks.num_floats(),
                           " floats were passed with ", blocks.signs.size(), " signs and ",
                           rows.size(), " floats");
  }
  return ForPresentServers([&](const Placement& placement) {
    const RoutedRows routed = RouteRows(blocks, rows.data(), placement);
    std::vector<SetRowsRequest> requests;
    for (size_t server = 0; server < routed.rows.size(); ++server) {
      requests.push_back({routed.requests[server].view(), routed.rows[server]});
    }
    return WithConfiguration(deadline,
                             [&] { return rows_->SetRows(placement, requests, deadline); });
  });
}

Metrics EmbeddingWorker::metrics() const {
  Metrics metrics;
  table_.AddMetrics(&metrics);
  counters_.AddTo(&metrics);
  const std::lock_guard lock(config_mutex_);
  metrics.AddFlag("configured", config_.has_value());
  return metrics;
}

std::vector<const DurationStats*> EmbeddingWorker::durations() const {
  return {&register_times_,    &total_times_,  &preprocess_times_, &rpc_times_,
          &postprocess_times_, &update_times_, &reduce_times_,     &update_rpc_times_};
}

}  // namespace persia::worker

#include "worker/embedding_worker.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "base/incarnation.h"
#include "worker/batch_plan.h"
#include "worker/batch_table.h"
#include "worker/embeddings_writer.h"
#include "worker/feature_batch.h"
#include "worker/pooling.h"
#include "worker/reduction.h"
#include "worker/routed_rows.h"
#include "worker/slot_table.h"

namespace persia::worker {

namespace {

// A batch that is to be released while a request works on it is about to be returned or answered.
constexpr std::chrono::seconds kReleasePatience{10};

// That wait for their lookup, and whose rows servers are asked to bring into memory: so many that
// rows come in time, so few that they are not gone again.
constexpr uint64_t kBatchesAhead = 4;

BatchTable::Options TableOptions(const WorkerOptions& options) {
  BatchTable::Options table;
  table.max_waiting_per_loader = options.forward_buffer_size;
  table.max_waiting_bytes = options.forward_buffer_bytes;
  table.max_in_flight = options.max_in_flight;
  table.expiry = options.buffered_data_expired;
  return table;
}

// The planner keeps its tables from batch to batch; one for each thread that looks batches up.
BatchPlan MakePlan(const FeatureBatch& features, const SlotTable& slots, uint32_t num_servers,
                   SlotCounters* counters) {
  thread_local BatchPlanner planner;
  return planner.Make(features, slots, num_servers, counters);
}

std::vector<const float*> FindRows(const BatchPlan& plan, std::span<const ServerRows> answers,
                                   LookupParts parts) {
  std::vector<const float*> begins;
  for (const ServerRows& answer : answers) begins.push_back(answer.rows.data());
  std::vector<const float*> rows;
  LocateRows(plan, std::move(begins), &rows, parts);
  return rows;
}

// A server has been asked by some of the batch's lookups; the first of them dates the update.
void StampUpdate(std::span<const PartsLookup> lookups, size_t server, ServerUpdate* update) {
  for (const PartsLookup& lookup : lookups) {
    const LookupStamp& stamp = lookup.stamps[server];
    if (update->lookup_incarnation == 0) {
      update->lookup_incarnation = stamp.incarnation;
      update->lookup_counter = stamp.update_counter;
    }
    // A server that has restarted between two lookups counts from 0 again.
    const bool counted = stamp.incarnation != 0 && stamp.incarnation == update->lookup_incarnation;
    update->updates_until.push_back(
        counted ? std::optional(stamp.update_counter - update->lookup_counter) : std::nullopt);
  }
}

std::vector<ServerUpdate> MakeUpdates(const ReducedGradients& reduced, const Batch& batch) {
  std::vector<ServerUpdate> updates(reduced.requests.size());
  for (size_t server = 0; server < updates.size(); ++server) {
    updates[server].blocks = &reduced.requests[server];
    updates[server].gradients = reduced.gradients[server];
    StampUpdate(batch.lookups, server, &updates[server]);
  }
  return updates;
}

// Notes a lookup for training; of a part that was looked up before, the later lookup counts.
void NoteLookup(LookupParts parts, std::vector<LookupStamp> stamps,
                std::vector<PartsLookup>* lookups) {
  const uint32_t bits = parts == kAllParts ? ~uint32_t{0} : parts;
  for (PartsLookup& earlier : *lookups) earlier.parts &= ~bits;
  std::erase_if(*lookups, [](const PartsLookup& lookup) { return lookup.parts == 0; });
  lookups->push_back({bits, std::move(stamps)});
}

std::vector<LookupStaleness> StalenessOf(std::span<const PartsLookup> lookups,
                                         const UpdateResult& update) {
  std::vector<LookupStaleness> found;
  for (size_t i = 0; i < lookups.size(); ++i) {
    const bool asked = i < update.lookup_staleness.size();
    found.push_back({lookups[i].parts, asked ? update.lookup_staleness[i] : 0});
  }
  return found;
}

Status CheckParts(LookupParts parts, bool requires_grad) {
  if (parts == kAllParts || requires_grad) return Status::Ok();
  return InvalidArgument("part of a batch is looked up for training only: set requires_grad");
}

uint64_t CountSigns(std::span<const ServerBlocks> requests) {
  uint64_t count = 0;
  for (const ServerBlocks& request : requests) count += request.signs.size();
  return count;
}

// One spelling for what Status and StatusOr call differently.
StatusCode CodeOf(const Status& status) { return status.code(); }
template <typename T>
StatusCode CodeOf(const StatusOr<T>& result) {
  return result.status().code();
}

std::vector<LookupStamp> StampsOf(std::span<const ServerRows> answers) {
  std::vector<LookupStamp> stamps;
  for (const ServerRows& answer : answers) {
    stamps.push_back({answer.incarnation, answer.update_counter});
  }
  return stamps;
}

}  // namespace

class EmbeddingWorker::Impl {
 public:
  Impl(WorkerOptions options, SlotTable slots, std::shared_ptr<RowService> rows)
      : slots_(std::move(slots)), rows_(std::move(rows)), table_(TableOptions(options)) {}

  uint64_t incarnation() const { return incarnation_; }
  RowService& rows() { return *rows_; }

  Status Configure(const TrainConfig& config, bool replace, Deadline deadline);
  StatusOr<Reference> Register(uint32_t loader_index, std::span<const std::byte> id_features);
  StatusOr<net::Parts> Lookup(Reference reference, bool requires_grad, Deadline deadline,
                              LookupParts parts);
  StatusOr<net::Parts> LookupDirect(std::span<const std::byte> id_features, bool requires_grad,
                                    Deadline deadline, LookupParts parts);
  StatusOr<ReturnReport> Return(Reference reference, float scale,
                                std::span<const SlotGradient> gradients, Deadline deadline);
  Status Release(Reference reference);
  Status SetEmbeddings(std::span<const ServerBlocks::Block> blocks, std::span<const uint64_t> signs,
                       std::span<const float> rows, Deadline deadline);
  WorkerStats stats() const;
  std::vector<SlotStats> slot_stats() const { return slot_counters_.stats(); }
  std::vector<const DurationStats*> durations() const;

 private:
  StatusOr<FeatureBatch> Decode(std::span<const std::byte> id_features) const;
  Status CheckIncarnation(Reference reference) const;
  StatusOr<uint64_t> Add(uint32_t loader_index, std::span<const std::byte> id_features);
  // Of a leased batch, where it has none.
  void Plan(Batch& batch);
  // Where servers want it: tells them what the next batches will look up.
  void Announce();
  // Looks the leased batch up and pools it.
  StatusOr<net::Parts> LookupLeased(Batch& batch, bool requires_grad, Deadline deadline,
                                    LookupParts parts);
  StatusOr<std::vector<ServerRows>> LookupRows(const Batch& batch, bool requires_grad,
                                               Deadline deadline, LookupParts parts);
  StatusOr<net::Parts> Pool(const Batch& batch, std::span<const ServerRows> answers,
                            bool requires_grad, LookupParts parts) const;
  StatusOr<ReturnReport> ReturnLeased(const Batch& batch, float scale,
                                      std::span<const SlotGradient> gradients, Deadline deadline);
  StatusOr<ReducedGradients> Reduce(const Batch& batch, float scale,
                                    std::span<const SlotGradient> gradients);
  // Runs `call`; where a server says that it is not configured (it has restarted), tells it, and
  // runs `call` once more.
  template <typename Call>
  auto WithConfiguration(Deadline deadline, Call call) -> decltype(call());

  const uint64_t incarnation_ = DrawIncarnation();
  const SlotTable slots_;
  SlotCounters slot_counters_{slots_};
  const std::shared_ptr<RowService> rows_;
  BatchTable table_;
  mutable std::mutex config_mutex_;
  std::optional<TrainConfig> config_;
  std::atomic<uint64_t> num_looked_up_{0};
  std::atomic<uint64_t> num_ids_{0};
  std::atomic<uint64_t> num_signs_{0};
  std::atomic<uint64_t> num_nonfinite_slots_{0};
  std::atomic<uint64_t> num_skipped_slots_{0};
  std::atomic<uint64_t> num_gradients_{0};
  std::atomic<uint64_t> num_gradients_left_out_{0};
  std::atomic<uint64_t> num_announced_{0};
  std::atomic<uint64_t> num_announced_dropped_{0};
  DurationStats register_times_{"register"};
  DurationStats total_times_{"lookup total"};
  DurationStats preprocess_times_{"lookup preprocess"};
  DurationStats rpc_times_{"lookup rpc"};
  DurationStats postprocess_times_{"lookup postprocess"};
  DurationStats update_times_{"update gradient"};
  DurationStats reduce_times_{"update reduce"};
  DurationStats update_rpc_times_{"update rpc"};
};

template <typename Call>
auto EmbeddingWorker::Impl::WithConfiguration(Deadline deadline, Call call) -> decltype(call()) {
  auto result = call();
  if (CodeOf(result) != StatusCode::kFailedPrecondition) return result;
  std::optional<TrainConfig> config;
  {
    const std::lock_guard lock(config_mutex_);
    config = config_;
  }
  if (!config.has_value()) {
    return FailedPrecondition(
        "the embedding optimizer is not configured: enter a TrainCtx before training lookups");
  }
  PERSIA_RETURN_IF_ERROR(rows_->Configure(*config, /*replace=*/false, deadline));
  return call();
}

Status EmbeddingWorker::Impl::Configure(const TrainConfig& config, bool replace,
                                        Deadline deadline) {
  const TrainConfig full = slots_.WithGroups(config);
  PERSIA_RETURN_IF_ERROR(full.Validate());
  PERSIA_RETURN_IF_ERROR(rows_->Configure(full, replace, deadline));
  const std::lock_guard lock(config_mutex_);
  config_ = full;
  return Status::Ok();
}

StatusOr<FeatureBatch> EmbeddingWorker::Impl::Decode(std::span<const std::byte> id_features) const {
  Buffer bytes(id_features.size());
  if (!id_features.empty()) std::memcpy(bytes.data(), id_features.data(), id_features.size());
  return FeatureBatch::Decode(std::move(bytes), slots_);
}

Status EmbeddingWorker::Impl::CheckIncarnation(Reference reference) const {
  if (reference.incarnation == incarnation_) return Status::Ok();
  return NotFound("the embedding worker has restarted since batch " +
                  std::to_string(reference.counter) + " was registered: its batches are gone");
}

StatusOr<Reference> EmbeddingWorker::Impl::Register(uint32_t loader_index,
                                                    std::span<const std::byte> id_features) {
  const StatusOr<uint64_t> counter = Add(loader_index, id_features);
  if (!counter.ok()) return counter.status();
  Announce();
  return Reference{incarnation_, counter.value()};
}

StatusOr<uint64_t> EmbeddingWorker::Impl::Add(uint32_t loader_index,
                                              std::span<const std::byte> id_features) {
  Timed timed(register_times_);
  StatusOr<FeatureBatch> features = Decode(id_features);
  if (!features.ok()) return features.status();
  StatusOr<uint64_t> counter = table_.AddWaiting(loader_index, std::move(features).value());
  if (counter.ok()) timed.set_reference(*counter);
  return counter;
}

StatusOr<net::Parts> EmbeddingWorker::Impl::Lookup(Reference reference, bool requires_grad,
                                                   Deadline deadline, LookupParts parts) {
  PERSIA_RETURN_IF_ERROR(CheckParts(parts, requires_grad));
  PERSIA_RETURN_IF_ERROR(CheckIncarnation(reference));
  StatusOr<BatchTable::Lease> lease = table_.Acquire(reference.counter, deadline);
  if (!lease.ok()) return lease.status();
  if (requires_grad) PERSIA_RETURN_IF_ERROR(table_.StartFlight(*lease));
  StatusOr<net::Parts> message = LookupLeased(**lease, requires_grad, deadline, parts);
  if (message.ok() && !requires_grad) table_.FinishReleased(*lease);
  return message;
}

StatusOr<net::Parts> EmbeddingWorker::Impl::LookupDirect(std::span<const std::byte> id_features,
                                                         bool requires_grad, Deadline deadline,
                                                         LookupParts parts) {
  PERSIA_RETURN_IF_ERROR(CheckParts(parts, requires_grad));
  StatusOr<FeatureBatch> features = Decode(id_features);
  if (!features.ok()) return features.status();
  StatusOr<BatchTable::Lease> lease = table_.AddInFlight(std::move(features).value());
  if (!lease.ok()) return lease.status();
  StatusOr<net::Parts> message = LookupLeased(**lease, requires_grad, deadline, parts);
  // After a failure nobody knows the reference, so nobody could return or release the batch.
  if (!message.ok() || !requires_grad) table_.FinishReleased(*lease);
  return message;
}

void EmbeddingWorker::Impl::Plan(Batch& batch) {
  if (batch.plan.has_value()) return;
  const Timed timed(preprocess_times_, batch.counter);
  batch.plan = MakePlan(*batch.features, slots_, rows_->num_servers(), &slot_counters_);
  batch.features.reset();
}

// The plans that it takes are made earlier, not twice.
void EmbeddingWorker::Impl::Announce() {
  if (!rows_->WantsPrefetch()) return;
  const TracedBatch other(TracedBatch::kNone);  // not of the batch whose call this is
  while (auto lease = table_.TakeAhead(kBatchesAhead)) {
    Plan(**lease);
    const Announced announced = rows_->Prefetch((*lease)->plan->requests);
    num_announced_ += announced.num_signs;
    num_announced_dropped_ += announced.num_dropped;
  }
}

StatusOr<net::Parts> EmbeddingWorker::Impl::LookupLeased(Batch& batch, bool requires_grad,
                                                         Deadline deadline, LookupParts parts) {
  const Timed total(total_times_, batch.counter);
  Plan(batch);
  StatusOr<std::vector<ServerRows>> answers = LookupRows(batch, requires_grad, deadline, parts);
  if (!answers.ok()) return answers.status();
  const bool first = batch.lookups.empty();
  // Only what was looked up for training may be updated.
  if (requires_grad) NoteLookup(parts, StampsOf(*answers), &batch.lookups);
  if (first) {  // counted as a whole
    num_looked_up_ += 1;
    num_ids_ += batch.plan->num_ids;
    num_signs_ += batch.plan->num_signs();
  }
  const Timed timed(postprocess_times_, batch.counter);
  return Pool(batch, *answers, requires_grad, parts);
}

StatusOr<std::vector<ServerRows>> EmbeddingWorker::Impl::LookupRows(const Batch& batch,
                                                                    bool requires_grad,
                                                                    Deadline deadline,
                                                                    LookupParts parts) {
  std::vector<ServerBlocks> some;
  if (parts != kAllParts) some = RequestsOf(*batch.plan, parts);
  return WithConfiguration(deadline, [&] {
    const Timed timed(rpc_times_, batch.counter);
    return rows_->Lookup(parts == kAllParts ? batch.plan->requests : some, requires_grad, deadline);
  });
}

StatusOr<net::Parts> EmbeddingWorker::Impl::Pool(const Batch& batch,
                                                 std::span<const ServerRows> answers,
                                                 bool requires_grad, LookupParts parts) const {
  const BatchPlan& plan = *batch.plan;
  StatusOr<EmbeddingsWriter> writer =
      EmbeddingsWriter::Create(plan, incarnation_, requires_grad ? batch.counter : 0, parts);
  if (!writer.ok()) return writer.status();
  const std::vector<const float*> rows = FindRows(plan, answers, parts);
  for (size_t i = 0; i < plan.features.size(); ++i) {
    if (!Includes(parts, plan.features[i].slot->part)) continue;
    PoolFeature(plan.features[i], plan.batch_size, rows, writer->slots()[i]);
  }
  net::Parts message;
  message.AddOwned(writer->Release());
  return message;
}

StatusOr<ReturnReport> EmbeddingWorker::Impl::Return(Reference reference, float scale,
                                                     std::span<const SlotGradient> gradients,
                                                     Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckIncarnation(reference));
  StatusOr<BatchTable::Lease> lease = table_.Acquire(reference.counter, deadline);
  // Looked up after the batch, so that a return that finishes in between is found.
  if (!lease.ok()) {
    const std::optional<ReturnReport> first = table_.FindReturned(reference.counter);
    if (first.has_value()) return *first;
    return lease.status();
  }
  StatusOr<ReturnReport> report = ReturnLeased(**lease, scale, gradients, deadline);
  if (!report.ok()) return report;
  table_.FinishReturned(*lease, *report);
  Announce();  // one more has been looked up; and here no rank waits for what it takes
  return report;
}

StatusOr<ReturnReport> EmbeddingWorker::Impl::ReturnLeased(const Batch& batch, float scale,
                                                           std::span<const SlotGradient> gradients,
                                                           Deadline deadline) {
  if (batch.lookups.empty()) {
    return FailedPrecondition("batch " + std::to_string(batch.counter) +
                              " was not looked up for training: there is nothing to update");
  }
  const Timed total(update_times_, batch.counter);
  StatusOr<ReducedGradients> reduced = Reduce(batch, scale, gradients);
  if (!reduced.ok()) return reduced.status();
  ReturnReport report;
  report.num_nonfinite_slots = reduced->num_nonfinite_slots;
  report.num_skipped_slots = reduced->num_skipped_slots;
  const uint64_t num_sent = CountSigns(reduced->requests);
  if (num_sent > 0) {
    const std::vector<ServerUpdate> updates = MakeUpdates(*reduced, batch);
    const UpdateKey key{incarnation_, batch.counter};
    StatusOr<UpdateResult> update = WithConfiguration(deadline, [&] {
      const Timed timed(update_rpc_times_, batch.counter);
      return rows_->Update(key, updates, deadline);
    });
    if (!update.ok()) return update.status();
    report.update = std::move(*update);
  }
  report.lookups = StalenessOf(batch.lookups, report.update);
  num_nonfinite_slots_ += report.num_nonfinite_slots;
  num_skipped_slots_ += report.num_skipped_slots;
  num_gradients_ += batch.plan->num_signs();
  num_gradients_left_out_ += batch.plan->num_signs() - num_sent;
  const auto slot = [&](uint32_t feature) -> const SlotConfig& {
    return *batch.plan->features[feature].slot;
  };
  for (const uint32_t i : reduced->nonfinite_features) slot_counters_.Nonfinite(slot(i));
  for (const uint32_t i : reduced->skipped_features) slot_counters_.Skipped(slot(i));
  return report;
}

StatusOr<ReducedGradients> EmbeddingWorker::Impl::Reduce(const Batch& batch, float scale,
                                                         std::span<const SlotGradient> gradients) {
  const Timed timed(reduce_times_, batch.counter);
  return ReduceGradients(*batch.plan, scale, gradients);
}

Status EmbeddingWorker::Impl::Release(Reference reference) {
  PERSIA_RETURN_IF_ERROR(CheckIncarnation(reference));
  if (!table_.WasIssued(reference.counter)) {
    return NotFound("batch " + std::to_string(reference.counter) + " was never registered");
  }
  const Deadline deadline = std::chrono::steady_clock::now() + kReleasePatience;
  StatusOr<BatchTable::Lease> lease = table_.Acquire(reference.counter, deadline);
  if (lease.ok()) {
    table_.FinishReleased(*lease);
    return Status::Ok();
  }
  // Gone already: releasing twice is fine.
  return lease.status().code() == StatusCode::kNotFound ? Status::Ok() : lease.status();
}

Status EmbeddingWorker::Impl::SetEmbeddings(std::span<const ServerBlocks::Block> blocks,
                                            std::span<const uint64_t> signs,
                                            std::span<const float> rows, Deadline deadline) {
  StatusOr<RoutedRows> routed = RouteRows(blocks, signs, rows, rows_->num_servers());
  if (!routed.ok()) return routed.status();
  const std::vector<std::span<const float>> views(routed->rows.begin(), routed->rows.end());
  return WithConfiguration(deadline,
                           [&] { return rows_->SetRows(routed->requests, views, deadline); });
}

WorkerStats EmbeddingWorker::Impl::stats() const {
  WorkerStats stats;
  table_.FillStats(&stats);
  stats.num_looked_up = num_looked_up_;
  stats.num_ids = num_ids_;
  stats.num_signs = num_signs_;
  stats.num_nonfinite_slots = num_nonfinite_slots_;
  stats.num_skipped_slots = num_skipped_slots_;
  stats.num_gradients = num_gradients_;
  stats.num_gradients_left_out = num_gradients_left_out_;
  stats.num_announced = num_announced_;
  stats.num_announced_dropped = num_announced_dropped_;
  const std::lock_guard lock(config_mutex_);
  stats.configured = config_.has_value();
  return stats;
}

std::vector<const DurationStats*> EmbeddingWorker::Impl::durations() const {
  return {&register_times_,    &total_times_,  &preprocess_times_, &rpc_times_,
          &postprocess_times_, &update_times_, &reduce_times_,     &update_rpc_times_};
}

StatusOr<std::unique_ptr<EmbeddingWorker>> EmbeddingWorker::Create(
    WorkerOptions options, std::shared_ptr<RowService> rows) {
  if (rows->num_servers() == 0) {
    return InvalidArgument("an embedding worker needs at least one parameter server, not 0");
  }
  if (options.forward_buffer_size == 0 || options.max_in_flight == 0) {
    return InvalidArgument("forward_buffer_size and max_in_flight must be at least 1");
  }
  StatusOr<SlotTable> slots =
      SlotTable::Create(options.feature_index_prefix_bit, std::move(options.slots));
  if (!slots.ok()) return slots.status();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(slots).value(), std::move(rows));
  return std::unique_ptr<EmbeddingWorker>(new EmbeddingWorker(std::move(impl)));
}

EmbeddingWorker::EmbeddingWorker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EmbeddingWorker::~EmbeddingWorker() = default;

uint64_t EmbeddingWorker::incarnation() const { return impl_->incarnation(); }
WorkerStats EmbeddingWorker::stats() const { return impl_->stats(); }
std::vector<SlotStats> EmbeddingWorker::slot_stats() const { return impl_->slot_stats(); }
std::vector<const DurationStats*> EmbeddingWorker::durations() const { return impl_->durations(); }

Status EmbeddingWorker::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  return impl_->Configure(config, replace, deadline);
}
StatusOr<Reference> EmbeddingWorker::Register(uint32_t loader_index,
                                              std::span<const std::byte> id_features) {
  return impl_->Register(loader_index, id_features);
}
StatusOr<net::Parts> EmbeddingWorker::Lookup(Reference reference, bool requires_grad,
                                             Deadline deadline, LookupParts parts) {
  return impl_->Lookup(reference, requires_grad, deadline, parts);
}
StatusOr<net::Parts> EmbeddingWorker::LookupDirect(std::span<const std::byte> id_features,
                                                   bool requires_grad, Deadline deadline,
                                                   LookupParts parts) {
  return impl_->LookupDirect(id_features, requires_grad, deadline, parts);
}
StatusOr<ReturnReport> EmbeddingWorker::ReturnGradients(Reference reference, float scale,
                                                        std::span<const SlotGradient> gradients,
                                                        Deadline deadline) {
  return impl_->Return(reference, scale, gradients, deadline);
}
Status EmbeddingWorker::Release(Reference reference) { return impl_->Release(reference); }

Status EmbeddingWorker::SetEmbeddings(std::span<const ServerBlocks::Block> blocks,
                                      std::span<const uint64_t> signs, std::span<const float> rows,
                                      Deadline deadline) {
  return impl_->SetEmbeddings(blocks, signs, rows, deadline);
}
Status EmbeddingWorker::Clear(Deadline deadline) { return impl_->rows().Clear(deadline); }
StatusOr<std::vector<uint64_t>> EmbeddingWorker::Sizes(Deadline deadline) {
  return impl_->rows().Sizes(deadline);
}

}  // namespace persia::worker

#include "client/exact_rows.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/hash.h"
#include "client/exact_batch.h"
#include "store/whole_rows.h"

namespace persia::client {

using worker::BatchReference;
using worker::SlotGradient;

namespace {

constexpr char kEnded[] = "the context with consistency='exact' has ended";

// The embeddings of no slot: they are pooled in the batch's training step.
worker::LookupResult AbsentSlots(const worker::LookupPlan& plan, const BatchReference& reference) {
  worker::LookupResult result;
  result.reference = reference;
  result.batch_size = plan.batch_size;
  for (const worker::PlannedFeature& feature : plan.features) {
    worker::SlotEmbedding& slot = result.slots.emplace_back();
    slot.name = feature.slot->name;
    slot.absent = true;
    slot.dim = feature.slot->dim;
  }
  return result;
}

}  // namespace

StatusOr<std::unique_ptr<ExactRows>> ExactRows::Create(uint32_t feature_index_prefix_bit,
                                                       std::vector<worker::SlotConfig> slots,
                                                       worker::SlotMask served, uint64_t max_bytes,
                                                       uint64_t spare_bytes) {
  PERSIA_ASSIGN_OR_RETURN(worker::SlotTable table,
                          worker::SlotTable::Create(feature_index_prefix_bit, std::move(slots)));
  return std::unique_ptr<ExactRows>(
      new ExactRows(std::move(table), served, max_bytes, spare_bytes));
}

Status ExactRows::Configure(const TrainConfig& config) {
  const TrainConfig full = slots_.WithGroups(config);
  PERSIA_RETURN_IF_ERROR(store::CheckReplayable(full));
  auto policies = std::make_shared<const store::RowPolicies>(full);
  const std::lock_guard lock(mutex_);
  config_ = config;
  policies_ = std::move(policies);
  return Status::Ok();
}

bool ExactRows::HasConfig(const TrainConfig& config) const {
  const std::lock_guard lock(mutex_);
  return policies_ != nullptr && config_ == config;
}

// The batch uses the rows that the rank holds in the same step that decides not to ask for them:
// between the two, they could be evicted.
StatusOr<ExactRows::BatchPtr> ExactRows::Begin(std::span<const std::byte> id_features,
                                               worker::LookupWholeRequest* request,
                                               worker::Deadline deadline) {
  Buffer bytes(id_features.size());
  if (!id_features.empty()) std::memcpy(bytes.data(), id_features.data(), id_features.size());
  PERSIA_ASSIGN_OR_RETURN(const auto features,
                          worker::FeatureBatch::Decode(std::move(bytes), slots_));
  thread_local worker::LookupPlanner planner;  // keeps its tables from batch to batch
  auto batch = std::make_shared<Batch>();
  // For one server, so that a sign's number is its place among the signs. The worker has the same
  // numbers for any number of servers.
  batch->plan = planner.Make(features, slots_, Placement(1));
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [&] { return num_other_rows_ == 0 && !is_probing_; })) {
    return DeadlineExceeded(is_probing_ ? "the lookup before this one is not answered"
                                        : "rows are still being set, cleared or loaded");
  }
  PERSIA_RETURN_IF_ERROR(status_);
  if (has_ended_) return FailedPrecondition(kEnded);
  if (policies_ == nullptr) return FailedPrecondition("the embedding optimizer is not configured");
  is_probing_ = in_use_.empty() && held_.size() > 0;
  batch->number = next_number_++;
  looking_up_.insert(batch->number);
  in_use_.emplace(batch->number, batch);
  Want(*batch, request);
  return batch;
}

void ExactRows::Want(Batch& batch, worker::LookupWholeRequest* request) {
  const uint32_t num_signs = batch.plan.num_signs();
  batch.cells.assign(num_signs, HeldRows::kNoCell);
  batch.wanted.assign((num_signs + 63) / 64, 0);
  uint64_t num_spared = 0;
  for (const worker::PlannedGroup& group : batch.plan.groups) {
    if (!worker::Includes(served_, group.mode)) continue;
    const auto cells = std::span(batch.cells).subspan(group.first_number, group.num_signs);
    num_spared +=
        held_.Use(batch.signs().subspan(group.first_number, group.num_signs), batch.number, cells);
    for (uint32_t i = 0; i < group.num_signs; ++i) {
      const uint32_t number = group.first_number + i;
      if (cells[i] == HeldRows::kNoCell) batch.wanted[number / 64] |= uint64_t{1} << number % 64;
    }
  }
  num_spared_.Add(num_spared);
  request->slots = served_;
  request->wanted = batch.wanted;
}

// A server that was started again between two loops is no error, and neither are rows that another
// process has set then: the rank has no update that those servers lack.
bool ExactRows::AsksAgain(Batch& batch, const worker::WholeRows& answer,
                          worker::LookupWholeRequest* request) {
  const std::lock_guard lock(mutex_);
  if (!status_.ok() || in_use_.size() != 1 || num_pooling_ > 0) return false;
  if (!AreOthers(answer.incarnations)) return false;
  held_.Clear();
  Want(batch, request);
  request->key = answer.key;
  request->id_features = {};
  return true;
}

StatusOr<worker::LookupResult> ExactRows::Arrive(const BatchPtr& batch, uint32_t worker_index,
                                                 const worker::WholeRows& answer) {
  const std::lock_guard lock(mutex_);
  std::vector<uint64_t> inserted;
  Status status = CheckServers(answer);
  if (status.ok()) status = Insert(*batch, answer, &inserted);
  if (!status.ok()) {
    // Only rows that this answer brought may be of another config: a batch in flight may need
    // those that were held before it.
    for (const uint64_t sign : inserted) held_.Drop(sign);
    EndUse(*batch);
    return status;
  }
  // Under its first name, too: that is the one by which the batch moves again.
  if (const auto moved = moved_.find(KeyOf(answer.key)); moved != moved_.end()) {
    AddName(batch, moved->second);
    moved_.erase(moved);
  }
  AddName(batch, {answer.key, worker_index});
  EndLookup(*batch);
  return AbsentSlots(batch->plan, batch->references.back());
}

bool ExactRows::AreOthers(std::span<const uint64_t> incarnations) const {
  return held_.size() > 0 && !std::ranges::equal(incarnations, incarnations_);
}

// A server that has lost its rows begins them anew, while the rank would continue with the old
// ones. One that replaces another with all rows cannot be told from it.
Status ExactRows::CheckServers(const worker::WholeRows& answer) {
  PERSIA_RETURN_IF_ERROR(status_);
  // Servers of another generation have taken over the rows and the updates of those before. Servers
  // of the same one with other moved shards have restarted.
  if (answer.placement.num_servers() == placement_.num_servers() &&
      answer.placement.generation() == placement_.generation() && AreOthers(answer.incarnations)) {
    return status_ = FailedPrecondition(
               "a parameter server was started again, or its rows were set, cleared or loaded, "
               "while consistency='exact' held rows of ",
               batches_.size(), " batches in flight: load a checkpoint and begin a new context");
  }
  incarnations_ = answer.incarnations;
  placement_ = answer.placement;
  return Status::Ok();
}

// Walks the wanted signs in the order in which the worker asked its servers for them, so that each
// server's rows are taken from the front. Rows have different lengths where feature groups have
// different optimizers: too few or too many floats show another config.
Status ExactRows::Insert(Batch& batch, const worker::WholeRows& answer,
                         std::vector<uint64_t>* inserted) {
  std::vector<std::span<const float>> left = answer.rows;
  const store::RowPolicy* policy = nullptr;
  store::RowShape shape;
  uint64_t num_fetched = 0;
  if (left.empty()) return Corruption("an answer of no server");
  for (const worker::PlannedGroup& group : batch.plan.groups) {
    for (uint32_t i = 0; i < group.num_signs; ++i) {
      const uint32_t number = group.first_number + i;
      if (!batch.Wants(number)) continue;
      const uint64_t sign = batch.signs()[number];
      if (&policies_->Of(sign) != policy || shape.dim != group.dim) {
        policy = &policies_->Of(sign);
        shape = policy->ShapeFor(group.dim);
      }
      std::span<const float>& rows =
          left[left.size() == 1 ? 0 : answer.placement.ServerOf(SignHash(sign))];
      const uint32_t num_floats = store::WholeRowFloats(shape);
      if (rows.size() < num_floats) {
        return Corruption("whole rows end early: rank and servers differ in their config");
      }
      // The row may have arrived with another batch meanwhile, and have updates that these floats
      // lack: then it stays.
      PERSIA_ASSIGN_OR_RETURN(const HeldRows::Inserted row,
                              held_.Insert(sign, shape, rows.data(), batch.number));
      batch.cells[number] = row.cell;
      if (row.is_new) inserted->push_back(sign);
      rows = rows.subspan(num_floats);
      ++num_fetched;
    }
  }
  num_fetched_.Add(num_fetched);
  if (std::ranges::all_of(left, [](const auto& rest) { return rest.empty(); })) {
    return Status::Ok();
  }
  return Corruption("whole rows are left over: rank and servers differ in their config");
}

void ExactRows::Abandon(const BatchPtr& batch) {
  const std::lock_guard lock(mutex_);
  EndUse(*batch);
}

void ExactRows::EndUse(const Batch& batch) {
  in_use_.erase(batch.number);
  EndLookup(batch);
}

// The move may overtake the answer of the lookup, which another thread still waits for: such a move
// is remembered, and Arrive() finds it by the new name.
void ExactRows::Rename(const BatchReference& from, const BatchReference& to) {
  const std::lock_guard lock(mutex_);
  const auto found = batches_.find(KeyOf(from));
  if (found == batches_.end()) {
    std::erase_if(moved_, [&](const auto& move) { return KeyOf(move.second) == KeyOf(from); });
    moved_[KeyOf(to)] = from;
    return;
  }
  AddName(BatchPtr(found->second), to);
  changed_.notify_all();
}

void ExactRows::AddName(const BatchPtr& batch, const BatchReference& name) {
  batch->references.push_back(name);
  batches_[KeyOf(name)] = batch;
}

StatusOr<ExactRows::BatchPtr> ExactRows::Find(const BatchReference& reference) const {
  PERSIA_RETURN_IF_ERROR(status_);
  const auto found = batches_.find(KeyOf(reference));
  if (found != batches_.end()) return found->second;
  return NotFound("batch ", reference.reference, " is not among the batches in flight");
}

StatusOr<ExactRows::BatchPtr> ExactRows::FindWithRows(const BatchReference& reference) const {
  if (has_ended_) return FailedPrecondition(kEnded);
  return Find(reference);
}

// With the worker's own functions: the same bits.
StatusOr<worker::LookupResult> ExactRows::Pool(const BatchReference& reference) {
  BatchPtr batch;
  std::vector<const float*> rows;
  {
    const std::lock_guard lock(mutex_);
    PERSIA_ASSIGN_OR_RETURN(batch, FindWithRows(reference));
    rows.reserve(batch->cells.size());
    for (const uint32_t cell : batch->cells) {
      rows.push_back(cell == HeldRows::kNoCell ? nullptr : held_.values(cell));
    }
    ++num_pooling_;
  }
  // Counts back if there is no memory for the embeddings, too.
  const auto count_back = [](ExactRows* self) {
    const std::lock_guard lock(self->mutex_);
    --self->num_pooling_;
  };
  std::unique_ptr<ExactRows, decltype(count_back)> pooling(this, count_back);
  const worker::LookupPlan& plan = batch->plan;
  auto layout =
      worker::LayOutEmbeddings(plan, reference.worker_incarnation, reference.reference, served_);
  for (size_t i = 0; layout.ok() && i < plan.features.size(); ++i) {
    if (!worker::Includes(served_, plan.features[i].slot->mode)) continue;
    worker::PoolFeature(plan.features[i], plan.batch_size, rows, layout->slots[i]);
  }
  pooling.reset();
  {
    const std::lock_guard lock(mutex_);
    FreeMemory();
  }
  PERSIA_RETURN_IF_ERROR(layout.status());
  return worker::DecodeEmbeddings(reference.worker_index, std::move(layout->message));
}

// Gradients are reduced without the lock, which lookups need meanwhile. One thread applies (see the
// header), so no other update can come between.
Status ExactRows::Apply(const BatchReference& reference, float scale,
                        std::span<const SlotGradient> gradients) {
  BatchPtr batch;
  {
    const std::lock_guard lock(mutex_);
    PERSIA_ASSIGN_OR_RETURN(batch, FindWithRows(reference));
  }
  if (batch->update != 0) return Status::Ok();
  PERSIA_ASSIGN_OR_RETURN(batch->sums, worker::ReduceGradients(batch->plan, scale, gradients));
  const std::lock_guard lock(mutex_);
  // Another thread may have ended the batch meanwhile: its cells are no longer those of its rows.
  PERSIA_RETURN_IF_ERROR(FindWithRows(reference).status());
  Replay(*batch);
  batch->update = next_update_++;
  unacknowledged_[batch->update] = batch;
  return Status::Ok();
}

// By the servers' code, Shard::UpdateRun. Signs without a gradient are left out of the sums.
void ExactRows::Replay(Batch& batch) {
  constexpr uint32_t kAhead = 48;  // RowSteps reads 32 rows at a time
  batch.sum_of.assign(batch.plan.num_signs(), nullptr);
  const worker::ServerBlocks& kept = batch.sums.requests[0];
  const float* sum = batch.sums.gradients[0].data();
  size_t next = 0;
  uint32_t number = 0;
  for (const SignBlock& block : kept.blocks) {
    store::UpdateReport report;
    store::RowSteps steps(block.dim, &report);
    for (uint32_t i = 0; i < block.num_signs; ++i, ++number, sum += block.dim) {
      const uint64_t sign = kept.signs[next++];
      while (batch.signs()[number] != sign) ++number;
      batch.sum_of[number] = sum;
      if (number + kAhead < batch.cells.size()) held_.Prefetch(batch.cells[number + kAhead]);
      steps.Add(policies_->Of(sign), held_.View(batch.cells[number]), sum);
    }
    steps.Flush();
    num_replayed_.Add(report.num_updated);
  }
}

void ExactRows::EndLookup(const Batch& batch) {
  looking_up_.erase(batch.number);
  Drain();
  if (std::exchange(is_probing_, false)) changed_.notify_all();
}

void ExactRows::Drain() {
  while (!ended_.empty() && (looking_up_.empty() || *looking_up_.begin() >= ended_.front().first)) {
    in_use_.erase(ended_.front().second->number);
    ended_.pop_front();
  }
  held_.Trim(oldest_in_use());
  FreeMemory();
}

// Batches in flight name their rows by cells, which Compact() changes.
void ExactRows::FreeMemory() {
  if (num_pooling_ > 0) return;
  if (!status_.ok() && IsIdle() && unacknowledged_.empty()) {
    // Nothing is left of what was lost: the next batch reads the servers' rows.
    held_.Clear();
    status_ = Status::Ok();
  }
  if (has_ended_ && looking_up_.empty()) return held_.Clear();
  if (!held_.IsWasteful() || !held_.Compact(oldest_in_use())) return;
  num_compactions_.Add(1);
  for (const auto& [_, batch] : in_use_) held_.Find(batch->signs(), batch->cells);
}

Status ExactRows::CheckIdle(const char* what) const {
  const std::lock_guard lock(mutex_);
  return CheckIdleLocked(what);
}

// A lookup under way, too, may have rows of before in its answer. Pool() reads rows of a batch that
// another thread may end meanwhile.
bool ExactRows::IsIdle() const {
  return batches_.empty() && looking_up_.empty() && num_pooling_ == 0;
}

Status ExactRows::CheckIdleLocked(const char* what) const {
  if (IsIdle()) return Status::Ok();
  return FailedPrecondition(what, " while consistency='exact' holds ", held_.size(), " rows of ",
                            batches_.size(), " batches in flight, looks up ", looking_up_.size(),
                            ", and pools ", num_pooling_, ": do it before the loop or after it");
}

void ExactRows::EndContext() {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  FreeMemory();
}

Status ExactRows::BeginOtherRows(const char* what) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckIdleLocked(what));
  held_.Clear();
  ++num_other_rows_;
  return Status::Ok();
}

void ExactRows::EndOtherRows() {
  const std::lock_guard lock(mutex_);
  if (num_other_rows_ > 0) --num_other_rows_;
  changed_.notify_all();
}

Metrics ExactRows::metrics() const {
  Metrics metrics;
  counters_.AddTo(&metrics);
  const std::lock_guard lock(mutex_);
  metrics.AddGauge("num_held_rows", "persia_nn_held_rows", "Rows that the rank holds.",
                   held_.size());
  metrics.AddGauge("held_bytes", "persia_nn_held_bytes", "Memory of these rows and their index.",
                   held_.memory_bytes());
  return metrics;
}

}  // namespace persia::client

#include "worker/batch_table.h"

#include <algorithm>
#include <utility>

namespace persia::worker {

namespace {

using Clock = std::chrono::steady_clock;

// How long an update keeps a thread while it waits for the one before it, which may have failed.
// The caller repeats it.
constexpr std::chrono::seconds kPredecessorWait(1);

}  // namespace

LookupStamp FirstStamp(std::span<const SlotsLookup> lookups, size_t server) {
  for (const SlotsLookup& lookup : lookups) {
    if (lookup.stamps[server].incarnation != 0) return lookup.stamps[server];
  }
  return {};
}

void NoteLookup(SlotMask slots, std::span<const ServerRows> answers,
                std::vector<SlotsLookup>* lookups) {
  const SlotMask bits = slots == kAllSlots ? ~SlotMask{0} : slots;
  for (SlotsLookup& earlier : *lookups) earlier.slots &= ~bits;
  std::erase_if(*lookups, [](const SlotsLookup& lookup) { return lookup.slots == 0; });
  SlotsLookup& lookup = lookups->emplace_back();
  lookup.slots = bits;
  for (const ServerRows& answer : answers) lookup.stamps.push_back(answer.stamp);
}

SlotMask LookedUp(std::span<const SlotsLookup> lookups) {
  SlotMask slots = 0;
  for (const SlotsLookup& lookup : lookups) slots |= lookup.slots;
  return slots;
}

StatusOr<uint64_t> BatchTable::AddWaiting(uint32_t loader_index, FeatureBatch features) {
  const std::lock_guard lock(mutex_);
  const size_t num_bytes = features.size_bytes();
  // Expiry only when there is no room: looking through all batches costs more than adding one.
  if (MustWaitLocked(loader_index, num_bytes)) ExpireLocked(Batch::State::kWaiting);
  if (MustWaitLocked(loader_index, num_bytes)) {
    return ResourceExhausted("batch of data loader ", loader_index, ": ", total_waiting_,
                             " batches of ", waiting_bytes_,
                             " bytes in all wait for their lookup already: send it again later");
  }
  const std::shared_ptr<Batch> batch = MakeLocked(std::move(features), Batch::State::kWaiting);
  batch->loader_index = loader_index;
  batch->num_bytes = num_bytes;
  ++num_waiting_[loader_index];
  ++total_waiting_;
  waiting_bytes_ += num_bytes;
  return batch->counter;
}

StatusOr<BatchTable::Guard> BatchTable::AddInFlight(FeatureBatch features) {
  const std::lock_guard lock(mutex_);
  // Before the batch is made, so that one that is refused gets no counter.
  PERSIA_RETURN_IF_ERROR(MakeRoomInFlightLocked());
  const std::shared_ptr<Batch> batch = MakeLocked(std::move(features), Batch::State::kInFlight);
  ++num_in_flight_;
  batch->busy = true;
  return Guard(this, batch);
}

// Counters are never used again in a worker's life: a late request cannot reach another batch.
std::shared_ptr<Batch> BatchTable::MakeLocked(FeatureBatch features, Batch::State state) {
  auto batch = std::make_shared<Batch>();
  batch->features = std::move(features);
  batch->counter = next_counter_++;
  batch->state = state;
  batch->since = Clock::now();
  batches_.emplace(batch->counter, batch);
  return batch;
}

// A single batch above the limit of bytes must pass when nothing else waits, or it never would.
bool BatchTable::MustWaitLocked(uint32_t loader_index, size_t num_bytes) const {
  const auto waiting = num_waiting_.find(loader_index);
  if (waiting != num_waiting_.end() && waiting->second >= options_.max_waiting_per_loader) {
    return true;
  }
  return total_waiting_ > 0 && waiting_bytes_ + num_bytes > options_.max_waiting_bytes;
}

StatusOr<BatchTable::Guard> BatchTable::Acquire(uint64_t counter, Deadline deadline) {
  std::unique_lock lock(mutex_);
  auto found = batches_.end();
  const auto is_busy = [&] {
    found = batches_.find(counter);  // it may go away while this waits
    return found != batches_.end() && found->second->busy;
  };
  if (!batch_free_.wait_until(lock, deadline, [&] { return !is_busy(); })) {
    return DeadlineExceeded("another request is still working on batch ", counter);
  }
  if (found == batches_.end()) {
    return NotFound("batch ", counter,
                    " is not held here: it was returned, released or has expired");
  }
  found->second->busy = true;
  return Guard(this, found->second);
}

Status BatchTable::WaitReturned(uint64_t counter, Deadline deadline) {
  if (counter == 0) return Status::Ok();
  std::unique_lock lock(mutex_);
  const auto has_ended = [&] { return batches_.find(counter) == batches_.end(); };
  const Deadline until = std::min(deadline, Clock::now() + kPredecessorWait);
  if (!batch_free_.wait_until(lock, until, has_ended)) {
    return Unavailable("the update of batch ", counter, ", which is to come first, is missing");
  }
  if (returned_.contains(counter)) return Status::Ok();
  return NotFound("batch ", counter, ", whose update is to come first, has ended without one");
}

Status BatchTable::AwaitRequests(Deadline deadline) {
  std::unique_lock lock(mutex_);
  std::vector<std::shared_ptr<Batch>> busy;
  for (const auto& [counter, batch] : batches_) {
    if (batch->busy) busy.push_back(batch);
  }
  const auto have_ended = [&] {
    std::erase_if(busy, [](const auto& batch) { return !batch->busy; });
    return busy.empty();
  };
  if (batch_free_.wait_until(lock, deadline, have_ended)) return Status::Ok();
  return DeadlineExceeded("requests of before still work on ", busy.size(), " batches");
}

std::optional<BatchTable::Guard> BatchTable::NextToPrefetch(uint64_t limit) {
  const std::lock_guard lock(mutex_);
  // Those that a later batch has overtaken: they no longer count against the limit.
  ahead_.erase(ahead_.begin(), ahead_.lower_bound(newest_left_));
  if (ahead_.size() >= limit) return std::nullopt;
  for (auto next = batches_.lower_bound(next_ahead_); next != batches_.end(); ++next) {
    const std::shared_ptr<Batch>& batch = next->second;
    // What is being worked on is being looked up already.
    if (batch->state != Batch::State::kWaiting || batch->busy) continue;
    next_ahead_ = batch->counter + 1;
    ahead_.insert(batch->counter);
    batch->busy = true;
    return Guard(this, batch);
  }
  next_ahead_ = next_counter_;
  return std::nullopt;
}

void BatchTable::EndUse(Batch& batch) {
  {
    const std::lock_guard lock(mutex_);
    batch.busy = false;
  }
  batch_free_.notify_all();
}

// Idempotent, because a lookup may be repeated.
Status BatchTable::StartFlight(const Guard& guard) {
  const std::lock_guard lock(mutex_);
  if (guard->state == Batch::State::kInFlight) return Status::Ok();
  PERSIA_RETURN_IF_ERROR(MakeRoomInFlightLocked());
  LeaveWaitingLocked(*guard);
  guard->state = Batch::State::kInFlight;
  guard->since = Clock::now();
  ++num_in_flight_;
  return Status::Ok();
}

Status BatchTable::MakeRoomInFlightLocked() {
  if (num_in_flight_ >= options_.max_in_flight) ExpireLocked(Batch::State::kInFlight);
  if (num_in_flight_ < options_.max_in_flight) return Status::Ok();
  return ResourceExhausted(options_.max_in_flight,
                           " batches await their gradients already: return or release some");
}

// The report is remembered for a repetition of the request whose answer was lost.
void BatchTable::FinishReturned(const Guard& guard, const ReturnReport& report) {
  const std::lock_guard lock(mutex_);
  RemoveLocked(*guard);
  ++num_returned_;
  // In the same step as the removal: a repeated return finds either the batch or its report.
  returned_.emplace(guard->counter, report);
  returned_order_.push_back(guard->counter);
  if (returned_order_.size() > options_.max_remembered) {
    returned_.erase(returned_order_.front());
    returned_order_.pop_front();
  }
}

void BatchTable::FinishReleased(const Guard& guard) {
  const std::lock_guard lock(mutex_);
  RemoveLocked(*guard);
  ++num_released_;
}

// Called when there is no room, so that expiry costs nothing in a job that keeps up. A held batch
// is in use, however old.
void BatchTable::ExpireLocked(Batch::State state) {
  num_expired_ += RemoveSinceLocked(state, Clock::now() - options_.expiry).size();
}

uint64_t BatchTable::ReleaseWaiting() {
  std::vector<std::shared_ptr<Batch>> removed;  // freed without the lock: they may be large
  {
    const std::lock_guard lock(mutex_);
    removed = RemoveSinceLocked(Batch::State::kWaiting, Clock::time_point::max());
    num_released_ += removed.size();
  }
  batch_free_.notify_all();  // WaitReturned waits for the end of a batch
  return removed.size();
}

std::vector<std::shared_ptr<Batch>> BatchTable::RemoveSinceLocked(Batch::State state,
                                                                  Clock::time_point last) {
  std::vector<std::shared_ptr<Batch>> removed;
  for (auto next = batches_.begin(); next != batches_.end();) {
    std::shared_ptr<Batch> batch = (next++)->second;
    if (batch->state != state || batch->busy || batch->since > last) continue;
    RemoveLocked(*batch);
    removed.push_back(std::move(batch));
  }
  return removed;
}

void BatchTable::RemoveLocked(const Batch& batch) {
  if (batch.state == Batch::State::kWaiting) {
    LeaveWaitingLocked(batch);
  } else {
    --num_in_flight_;
  }
  batches_.erase(batch.counter);
}

// Of a batch that is looked up, released or expired: its bytes and its loader's share are free
// again.
void BatchTable::LeaveWaitingLocked(const Batch& batch) {
  const auto waiting = num_waiting_.find(batch.loader_index);
  if (--waiting->second == 0) num_waiting_.erase(waiting);
  --total_waiting_;
  waiting_bytes_ -= batch.num_bytes;
  ahead_.erase(batch.counter);
  newest_left_ = std::max(newest_left_, batch.counter);
}

std::optional<ReturnReport> BatchTable::FindReturned(uint64_t counter) const {
  const std::lock_guard lock(mutex_);
  const auto found = returned_.find(counter);
  if (found == returned_.end()) return std::nullopt;
  return found->second;
}

// Tells a batch that has ended from one that never was: releasing the former is no error.
bool BatchTable::WasIssued(uint64_t counter) const {
  const std::lock_guard lock(mutex_);
  return counter != 0 && counter < next_counter_;
}

void BatchTable::AddMetrics(Metrics* metrics) const {
  const std::lock_guard lock(mutex_);
  // Under one lock, so that the invariant holds in every status that is shown.
  metrics->AddCounter("num_registered", "persia_batches_registered",
                      "Batches that loaders have sent.", next_counter_ - 1);
  metrics->AddCounter("num_returned", "persia_batches_returned",
                      "Batches whose gradients were applied.", num_returned_);
  metrics->AddCounter("num_released", "persia_batches_released",
                      "Batches given up without gradients.", num_released_);
  metrics->AddCounter("num_expired", "persia_batches_expired",
                      "Batches dropped because nothing asked for them.", num_expired_);
  metrics->AddGauge("num_buffered", "num_pending_batches", "Batches that wait for their lookup.",
                    total_waiting_);
  metrics->AddGauge("num_in_flight", "staleness", "Batches between lookup and update.",
                    num_in_flight_);
}

}  // namespace persia::worker

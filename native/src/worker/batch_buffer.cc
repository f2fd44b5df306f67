#include "worker/batch_buffer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace persia::worker {
namespace {

// A repetition comes from a caller that still waits for its answer, so that far fewer would do.
constexpr size_t kMinRememberedReturns = 4096;

}  // namespace

StatusOr<uint64_t> BatchBuffer::Register(uint32_t loader_index, FeatureBatch features) {
  const uint64_t size_bytes = features.size_bytes();
  if (size_bytes > options_.max_waiting_bytes) {
    return InvalidArgument("a batch of " + std::to_string(size_bytes) +
                           " bytes is larger than forward_buffer_bytes (" +
                           std::to_string(options_.max_waiting_bytes) + "): send smaller batches");
  }
  const std::lock_guard lock(mutex_);
  if (!HasRoom(loader_index, size_bytes)) ExpireWaiting();
  if (!HasRoom(loader_index, size_bytes)) {
    return ResourceExhausted("the forward buffer is full: " +
                             std::to_string(num_waiting_by_loader_[loader_index]) +
                             " batches of loader " + std::to_string(loader_index) + " and " +
                             std::to_string(waiting_bytes_) + " bytes in all are waiting to be looked "
                             "up; try again");
  }
  ++totals_.num_registered;
  ++num_waiting_by_loader_[loader_index];
  waiting_bytes_ += size_bytes;
  waiting_.emplace(++last_counter_, Waiting{loader_index, Clock::now(), std::move(features)});
  return last_counter_;
}

bool BatchBuffer::HasRoom(uint32_t loader_index, uint64_t size_bytes) const {
  const auto it = num_waiting_by_loader_.find(loader_index);
  const uint64_t num_waiting = it == num_waiting_by_loader_.end() ? 0 : it->second;
  return num_waiting < options_.max_waiting_per_loader &&
         size_bytes <= options_.max_waiting_bytes - waiting_bytes_;
}

void BatchBuffer::ExpireWaiting() {
  const Clock::time_point oldest = Clock::now() - options_.expiry;
  auto it = waiting_.begin();
  while (it != waiting_.end() && it->second.since < oldest) {
    it = RemoveWaiting(it);
    ++totals_.num_expired;
  }
}

std::map<uint64_t, BatchBuffer::Waiting>::iterator BatchBuffer::RemoveWaiting(
    std::map<uint64_t, Waiting>::iterator it) {
  waiting_bytes_ -= it->second.features.size_bytes();
  const auto loader = num_waiting_by_loader_.find(it->second.loader_index);
  if (--loader->second == 0) num_waiting_by_loader_.erase(loader);
  return waiting_.erase(it);
}

StatusOr<uint64_t> BatchBuffer::RegisterInFlight(std::shared_ptr<InFlightBatch> batch) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(MakeRoomInFlight());
  ++totals_.num_registered;
  in_flight_.emplace(++last_counter_, InFlight{std::move(batch), Clock::now(), false, false});
  return last_counter_;
}

// A batch that is being returned is never expired: its gradients may be applied already.
Status BatchBuffer::MakeRoomInFlight() {
  if (in_flight_.size() < options_.max_in_flight) return Status::Ok();
  const Clock::time_point oldest = Clock::now() - options_.expiry;
  totals_.num_expired += std::erase_if(in_flight_, [&](const auto& entry) {
    return entry.second.since < oldest && !entry.second.returning;
  });
  if (in_flight_.size() < options_.max_in_flight) return Status::Ok();
  return ResourceExhausted(std::to_string(in_flight_.size()) +
                           " batches await their gradients (max_in_flight): return or release some");
}

StatusOr<std::shared_ptr<InFlightBatch>> BatchBuffer::StartLookup(uint64_t counter) {
  const std::lock_guard lock(mutex_);
  if (const auto it = in_flight_.find(counter); it != in_flight_.end()) {
    it->second.since = Clock::now();
    return it->second.batch;
  }
  const auto it = waiting_.find(counter);
  if (it == waiting_.end()) return UnknownReference(counter);
  PERSIA_RETURN_IF_ERROR(MakeRoomInFlight());
  auto batch = std::make_shared<InFlightBatch>();
  const uint64_t size_bytes = it->second.features.size_bytes();
  batch->features = std::move(it->second.features);
  waiting_bytes_ -= size_bytes;
  RemoveWaiting(it);
  in_flight_.emplace(counter, InFlight{batch, Clock::now(), false, false});
  return batch;
}

StatusOr<BatchBuffer::ReturnStart> BatchBuffer::StartReturn(uint64_t counter,
                                                            Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (const auto done = reports_.find(counter); done != reports_.end()) {
      return ReturnStart{nullptr, done->second};
    }
    const auto it = in_flight_.find(counter);
    if (it == in_flight_.end()) {
      if (!waiting_.contains(counter)) return UnknownReference(counter);
      return FailedPrecondition("reference " + std::to_string(counter) +
                                " was not looked up yet: its gradients cannot be known");
    }
    if (!it->second.returning) {
      it->second.returning = true;
      return ReturnStart{it->second.batch, {}};
    }
    if (return_finished_.wait_until(lock, deadline) == std::cv_status::timeout) {
      return DeadlineExceeded("reference " + std::to_string(counter) +
                              ": an earlier return of its gradients has not finished");
    }
  }
}

void BatchBuffer::FinishReturn(uint64_t counter, const std::optional<ReturnReport>& report) {
  {
    const std::lock_guard lock(mutex_);
    const auto it = in_flight_.find(counter);  // there: nothing removes a batch that is returning
    if (report.has_value()) {
      Remember(counter, *report);
      ++totals_.num_returned;
      in_flight_.erase(it);
    } else if (it->second.release_requested) {
      ++totals_.num_released;
      in_flight_.erase(it);
    } else {
      it->second.returning = false;
    }
  }
  return_finished_.notify_all();
}

void BatchBuffer::Remember(uint64_t counter, const ReturnReport& report) {
  reports_.emplace(counter, report);
  report_order_.push_back(counter);
  if (report_order_.size() <= std::max<size_t>(kMinRememberedReturns, options_.max_in_flight)) return;
  reports_.erase(report_order_.front());
  report_order_.pop_front();
}

Status BatchBuffer::Release(uint64_t counter) {
  const std::lock_guard lock(mutex_);
  if (const auto it = in_flight_.find(counter); it != in_flight_.end()) {
    if (it->second.returning) {
      it->second.release_requested = true;
      return Status::Ok();
    }
    in_flight_.erase(it);
    ++totals_.num_released;
  } else if (const auto waiting = waiting_.find(counter); waiting != waiting_.end()) {
    RemoveWaiting(waiting);
    ++totals_.num_released;
  } else if (counter == 0 || counter > last_counter_) {
    return UnknownReference(counter);
  }
  return Status::Ok();
}

Status BatchBuffer::UnknownReference(uint64_t counter) const {
  const std::string name = "reference " + std::to_string(counter);
  if (counter == 0 || counter > last_counter_) return NotFound(name + " was never given out");
  if (reports_.contains(counter)) return NotFound(name + " has been returned already");
  return NotFound(name + " is gone: it was released or evaluated, has expired, or was returned long ago");
}

BatchBuffer::Stats BatchBuffer::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = totals_;
  stats.num_waiting = waiting_.size();
  stats.num_in_flight = in_flight_.size();
  return stats;
}

}  // namespace persia::worker

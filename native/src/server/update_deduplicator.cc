#include "server/update_deduplicator.h"

#include <exception>
#include <string>

namespace persia::server {
namespace {

// An update may throw (an allocation, say). Its key must be released then too, or every repetition
// would wait for it until its deadline.
StatusOr<UpdateResult> WithoutThrowing(const std::function<StatusOr<UpdateResult>()>& apply) {
  try {
    return apply();
  } catch (const std::exception& e) {
    return Internal("the update failed: ", e.what());
  }
}

}  // namespace

StatusOr<UpdateResult> UpdateDeduplicator::Once(
    const BatchKey& key, std::chrono::steady_clock::time_point deadline,
    const std::function<StatusOr<UpdateResult>()>& apply, bool* repeated) {
  const std::pair id(key.worker_incarnation, key.reference);
  std::unique_lock lock(mutex_);
  if (!applied_.wait_until(lock, deadline, [&] { return !applying_.contains(id); })) {
    return DeadlineExceeded("reference ", key.reference,
                            ": the same update is still being applied");
  }
  const auto known = Find(key);
  *repeated = known.has_value();
  if (known.has_value()) return *known;
  // From here on repetitions wait, until it is erased below.
  applying_.insert(id);
  lock.unlock();
  auto reply = WithoutThrowing(apply);
  lock.lock();
  applying_.erase(id);
  if (reply.ok()) Remember(key, *reply);
  // All, because those that wait do so for different keys.
  applied_.notify_all();
  return reply;
}

// The workers used last come last, and of each the oldest update first.
std::vector<AppliedUpdate> UpdateDeduplicator::Applied() const {
  const std::lock_guard lock(mutex_);
  std::vector<AppliedUpdate> updates;
  for (const uint64_t incarnation : recency_) {
    const Worker& worker = workers_.at(incarnation);
    for (const uint64_t reference : worker.order) {
      updates.push_back({{incarnation, reference}, worker.replies.at(reference)});
    }
  }
  return updates;
}

void UpdateDeduplicator::Replace(std::span<const AppliedUpdate> updates) {
  const std::lock_guard lock(mutex_);
  workers_.clear();
  recency_.clear();
  for (const AppliedUpdate& update : updates) Remember(update.key, update.result);
}

std::optional<UpdateResult> UpdateDeduplicator::Find(const BatchKey& key) {
  const auto worker = workers_.find(key.worker_incarnation);
  if (worker == workers_.end()) return std::nullopt;
  const auto reply = worker->second.replies.find(key.reference);
  if (reply == worker->second.replies.end()) return std::nullopt;
  Touch(key.worker_incarnation);
  return reply->second;
}

// The oldest key of the same worker is forgotten: workers do not push out one another's keys.
void UpdateDeduplicator::Remember(const BatchKey& key, const UpdateResult& reply) {
  Worker& worker = Touch(key.worker_incarnation);
  worker.replies.emplace(key.reference, reply);
  worker.order.push_back(key.reference);
  if (worker.order.size() <= limits_.keys_per_worker) return;
  worker.replies.erase(worker.order.front());
  worker.order.pop_front();
}

// Makes the worker the most recently used; a new one replaces the least recently used.
UpdateDeduplicator::Worker& UpdateDeduplicator::Touch(uint64_t incarnation) {
  const auto found = workers_.find(incarnation);
  if (found != workers_.end()) {
    recency_.splice(recency_.end(), recency_, found->second.recency);
    return found->second;
  }
  if (workers_.size() >= limits_.workers) {
    workers_.erase(recency_.front());
    recency_.pop_front();
  }
  Worker& worker = workers_[incarnation];
  worker.recency = recency_.insert(recency_.end(), incarnation);
  return worker;
}

}  // namespace persia::server

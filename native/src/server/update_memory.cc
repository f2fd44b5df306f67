#include "server/update_memory.h"

#include <exception>
#include <string>

namespace persia::server {
namespace {

// What is called may throw (an allocation, say); the key must be given back then too, or every
// repetition would wait for it until its deadline.
StatusOr<UpdateRowsReply> WithoutThrowing(const std::function<StatusOr<UpdateRowsReply>()>& apply) {
  try {
    return apply();
  } catch (const std::exception& e) {
    return Internal(std::string("the update failed: ") + e.what());
  }
}

}  // namespace

StatusOr<UpdateRowsReply> UpdateMemory::Once(
    Key key, std::chrono::steady_clock::time_point deadline,
    const std::function<StatusOr<UpdateRowsReply>()>& apply, bool* repeated) {
  std::unique_lock lock(mutex_);
  if (!applied_.wait_until(lock, deadline, [&] { return !applying_.contains(key); })) {
    return DeadlineExceeded("reference " + std::to_string(key.second) +
                            ": the same update is still being applied");
  }
  const auto known = Find(key);
  *repeated = known.has_value();
  if (known.has_value()) return *known;
  applying_.insert(key);
  lock.unlock();
  auto reply = WithoutThrowing(apply);
  lock.lock();
  applying_.erase(key);
  if (reply.ok()) Remember(key, *reply);
  applied_.notify_all();
  return reply;
}

std::optional<UpdateRowsReply> UpdateMemory::Find(const Key& key) {
  const auto worker = workers_.find(key.first);
  if (worker == workers_.end()) return std::nullopt;
  const auto reply = worker->second.replies.find(key.second);
  if (reply == worker->second.replies.end()) return std::nullopt;
  Touch(key.first);
  return reply->second;
}

void UpdateMemory::Remember(const Key& key, const UpdateRowsReply& reply) {
  Worker& worker = Touch(key.first);
  worker.replies.emplace(key.second, reply);
  worker.order.push_back(key.second);
  if (worker.order.size() <= limits_.keys_per_worker) return;
  worker.replies.erase(worker.order.front());
  worker.order.pop_front();
}

// The worker becomes the most recently used; the least recently used gives way to a new one.
UpdateMemory::Worker& UpdateMemory::Touch(uint64_t incarnation) {
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

#include "worker/fan_out.h"

#include <condition_variable>
#include <mutex>
#include <utility>

namespace persia::worker {

std::vector<StatusOr<Buffer>> CallAll(net::Method method, std::vector<OutgoingCall> calls,
                                      Deadline deadline) {
  std::vector<StatusOr<Buffer>> replies;
  for (size_t i = 0; i < calls.size(); ++i) replies.emplace_back(Internal("not called"));
  if (calls.empty()) return replies;
  std::mutex mutex;
  std::condition_variable all_ended;
  size_t num_open = calls.size() - 1;
  for (size_t i = 1; i < calls.size(); ++i) {
    const auto done = [&, i](StatusOr<Buffer> reply) {
      // Notified under the lock: past it, the waiter may have destroyed the condition.
      const std::lock_guard lock(mutex);
      replies[i] = std::move(reply);
      if (--num_open == 0) all_ended.notify_one();
    };
    calls[i].channel->CallAsync(method, std::move(calls[i].parts), deadline, done);
  }
  // On this thread, which would only wait otherwise: one thread less to be woken for each call.
  replies[0] = calls[0].channel->Call(method, calls[0].parts, deadline);
  std::unique_lock lock(mutex);
  // Ends by the deadline: a channel ends every call by then.
  all_ended.wait(lock, [&] { return num_open == 0; });
  return replies;
}

Status FirstFailure(std::span<const StatusOr<Buffer>> replies) {
  Status first;
  for (const StatusOr<Buffer>& reply : replies) {
    if (reply.ok()) continue;
    Status status = reply.status();
    if (status.code() == StatusCode::kFailedPrecondition) return status;
    if (first.ok()) first = std::move(status);
  }
  return first;
}

}  // namespace persia::worker

#include "net/rpc.h"

#include <condition_variable>
#include <mutex>

namespace persia::net {

StatusOr<std::vector<Buffer>> CallAll(const MethodId& method, std::vector<OutgoingCall> calls,
                                      Clock::time_point deadline) {
  std::vector<Buffer> bodies(calls.size());
  if (calls.empty()) return bodies;
  std::mutex mutex;
  std::condition_variable all_ended;
  size_t num_open = calls.size();
  std::vector<Status> failures(calls.size());
  const auto end = [&](size_t i, StatusOr<Buffer> reply) {
    const std::lock_guard lock(mutex);
    if (reply.ok()) {
      bodies[i] = std::move(reply).value();
    } else {
      failures[i] = reply.status();
    }
    // Notified under the lock: past it, the waiter may have destroyed the condition.
    if (--num_open == 0) all_ended.notify_one();
  };
  for (size_t i = 1; i < calls.size(); ++i) {
    calls[i].channel->CallAsync(method, std::move(calls[i].segments), deadline,
                                [&end, i](StatusOr<Buffer> reply) { end(i, std::move(reply)); });
  }
  // On this thread, which would only wait otherwise: one thread less to be woken for each call.
  end(0, calls[0].channel->Call(method, calls[0].segments, deadline));
  {
    std::unique_lock lock(mutex);
    // Ends by the deadline: a channel ends every call by then.
    all_ended.wait(lock, [&] { return num_open == 0; });
  }
  // One error for all: the caller can act on one only.
  Status first;
  for (Status& failure : failures) {
    if (failure.code() == StatusCode::kFailedPrecondition) return failure;
    if (first.ok()) first = std::move(failure);
  }
  if (!first.ok()) return first;
  return bodies;
}

}  // namespace persia::net

#include "net/rpc.h"

#include <condition_variable>
#include <mutex>

namespace persia::net {

StatusOr<std::vector<Buffer>> CallAll(const MethodId& method, std::span<Channel* const> channels,
                                      std::vector<Segments> requests, Clock::time_point deadline) {
  std::vector<Buffer> bodies(channels.size());
  if (channels.empty()) return bodies;
  std::mutex mutex;
  std::condition_variable all_ended;
  size_t num_open = channels.size();
  std::vector<Status> failures(channels.size());
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
  for (size_t i = 1; i < channels.size(); ++i) {
    channels[i]->CallAsync(method, std::move(requests[i]), deadline,
                           [&end, i](StatusOr<Buffer> reply) { end(i, std::move(reply)); });
  }
  // On this thread, which would only wait otherwise: one thread less to be woken for each call.
  end(0, channels[0]->Call(method, requests[0], deadline));
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

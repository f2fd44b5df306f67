#include "client/worker_channels.h"

#include <algorithm>
#include <mutex>

namespace persia::client {
namespace {

constexpr uint32_t kMaxWorkers = 65536;  // bounds what one announcement can make us allocate

}  // namespace

WorkerChannels::WorkerChannels(uint32_t num_workers) { GrowTo(num_workers, true); }

void WorkerChannels::GrowTo(uint32_t num_workers, bool active) {
  while (workers_.size() < num_workers) {
    const std::string peer = "embedding-worker " + std::to_string(workers_.size());
    workers_.push_back(
        {std::make_shared<net::Channel>(net::Channel::Options{.peer = peer}), active});
  }
}

Status WorkerChannels::Set(uint32_t index, const std::string& address) {
  if (index >= kMaxWorkers) {
    return InvalidArgument("worker_index " + std::to_string(index) + ": at most " +
                           std::to_string(kMaxWorkers) + " embedding workers are possible");
  }
  const std::unique_lock lock(mutex_);
  // Workers between may come later, or have left: nothing is asked of them until they are set.
  GrowTo(index + 1, false);
  workers_[index].active = true;
  workers_[index].channel->SetAddress(address);
  return Status::Ok();
}

void WorkerChannels::Retire(uint32_t index) {
  const std::unique_lock lock(mutex_);
  if (index < workers_.size()) workers_[index].active = false;
}

StatusOr<std::shared_ptr<net::Channel>> WorkerChannels::At(uint32_t index) const {
  const std::shared_lock lock(mutex_);
  if (index < workers_.size()) return workers_[index].channel;
  return InvalidArgument("worker_index " + std::to_string(index) + ": there are only " +
                         std::to_string(workers_.size()) + " embedding workers, counted from 0");
}

std::vector<WorkerChannels::Link> WorkerChannels::Active() const {
  const std::shared_lock lock(mutex_);
  const bool any = std::any_of(workers_.begin(), workers_.end(),
                               [](const Worker& worker) { return worker.active; });
  std::vector<Link> links;
  for (uint32_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].active || !any) links.emplace_back(i, workers_[i].channel);
  }
  return links;
}

}  // namespace persia::client

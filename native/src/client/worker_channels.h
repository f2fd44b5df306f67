// The embedding workers of a RemoteClient: which there are, and which take new work.
//
// Workers may come and go while calls are under way. One that leaves takes no new work, but keeps
// its channel: it still answers for the batches that it holds. Thread-safe. A channel lives as long
// as anybody who got it from here uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "net/channel.h"

namespace persia::client {

class WorkerChannels {
 public:
  using Link = std::pair<uint32_t, std::shared_ptr<net::Channel>>;  // index, channel

  // `num_workers` >= 1 workers, expected but without an address yet.
  explicit WorkerChannels(uint32_t num_workers);

  // The worker's address, from now on; it takes new work. An index beyond those known adds workers.
  // kInvalidArgument for an index that no job reaches.
  Status Set(uint32_t index, const std::string& address);
  // The worker takes no new work. Nothing happens for one that is not known.
  void Retire(uint32_t index);

  // The worker that holds a batch; kInvalidArgument when it is not known.
  StatusOr<std::shared_ptr<net::Channel>> At(uint32_t index) const;
  // The workers that take new work, by index; all of them when none does. Never empty.
  std::vector<Link> Active() const;

 private:
  struct Worker {
    std::shared_ptr<net::Channel> channel;
    bool active = true;
  };
  void GrowTo(uint32_t num_workers, bool active);

  mutable std::shared_mutex mutex_;
  std::vector<Worker> workers_;
};

}  // namespace persia::client

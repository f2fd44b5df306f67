// UpdateDeduplicator: applies each update once, however often it is sent.
//
// It remembers the results of the last keys of each worker, and the workers that it saw last. Both
// are bounded, by far more than can be in flight: a key is forgotten only when no worker can repeat
// it any more.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/row_protocol.h"
#include "base/status.h"

namespace persia::server {

// An update that was applied, with its result.
struct AppliedUpdate {
  BatchKey key;
  UpdateResult result;
};
static_assert(sizeof(AppliedUpdate) == 40);

class UpdateDeduplicator {
 public:
  struct Limits {
    size_t keys_per_worker = 16'384;  // four times what a worker has in flight by default
    size_t workers = 256;
  };

  explicit UpdateDeduplicator(Limits limits) : limits_(limits) {}

  // Runs `apply`, or returns the result that it gave for this key before (`*repeated` is then
  // true). A repetition that arrives while `apply` runs waits for it, until `deadline`. An `apply`
  // that fails (kInternal where it throws) is not remembered: the next one with this key, also one
  // that is waiting, tries again. Thread-safe; `apply` runs outside the lock.
  StatusOr<UpdateResult> Once(const BatchKey& key, std::chrono::steady_clock::time_point deadline,
                              const std::function<StatusOr<UpdateResult>()>& apply, bool* repeated);

  // All that is remembered, in the order that Replace() needs: for a standby.
  std::vector<AppliedUpdate> Applied() const;
  void Replace(std::span<const AppliedUpdate> updates);

 private:
  // The keys of one life of an embedding worker.
  struct Worker {
    std::unordered_map<uint64_t, UpdateResult> replies;  // by reference
    std::deque<uint64_t> order;                          // oldest reference first
    std::list<uint64_t>::iterator recency;
  };

  std::optional<UpdateResult> Find(const BatchKey& key);
  void Remember(const BatchKey& key, const UpdateResult& reply);
  // The worker's entry, made if need be; it becomes the most recently used.
  Worker& Touch(uint64_t incarnation);

  const Limits limits_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable applied_;
  std::set<std::pair<uint64_t, uint64_t>> applying_;  // worker incarnation, reference
  std::unordered_map<uint64_t, Worker> workers_;
  std::list<uint64_t> recency_;  // incarnations, least recently used first
};

}  // namespace persia::server

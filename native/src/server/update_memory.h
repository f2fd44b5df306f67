// UpdateMemory: applies each update once, however often it is sent.
//
// An update's key is (worker incarnation, reference). Remembered are the replies to the last keys
// of each worker and the workers seen last, both bounded: far more than can be in flight, so that a
// key is forgotten only when nobody can repeat it any more.
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
#include <unordered_map>
#include <utility>

#include "base/row_protocol.h"
#include "base/status.h"

namespace persia::server {

class UpdateMemory {
 public:
  struct Limits {
    size_t keys_per_worker = 16'384;  // four times what a worker has in flight by default
    size_t workers = 256;
  };
  using Key = std::pair<uint64_t, uint64_t>;  // worker incarnation, reference

  explicit UpdateMemory(Limits limits) : limits_(limits) {}

  // Runs `apply`, or returns the reply that it gave for this key before (`*repeated` is then true).
  // A repetition that comes while `apply` runs waits for it, until `deadline`. An `apply` that
  // fails (kInternal where it throws) is not remembered: the next one with this key, also one that
  // is waiting, tries again. Thread-safe; `apply` runs outside the lock.
  StatusOr<UpdateRowsReply> Once(Key key, std::chrono::steady_clock::time_point deadline,
                                 const std::function<StatusOr<UpdateRowsReply>()>& apply,
                                 bool* repeated);

 private:
  struct Worker {
    std::unordered_map<uint64_t, UpdateRowsReply> replies;  // by reference
    std::deque<uint64_t> order;                             // oldest reference first
    std::list<uint64_t>::iterator recency;
  };

  std::optional<UpdateRowsReply> Find(const Key& key);
  void Remember(const Key& key, const UpdateRowsReply& reply);
  Worker& Touch(uint64_t incarnation);

  const Limits limits_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable applied_;
  std::set<Key> applying_;
  std::unordered_map<uint64_t, Worker> workers_;
  std::list<uint64_t> recency_;  // incarnations, least recently used first
};

}  // namespace persia::server

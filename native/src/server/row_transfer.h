// RowTransfer: an old server's end of a change of the number of servers (ADR 34). It sends its rows
// to the servers that will have them, while training continues.
//
// First all rows, as a snapshot shows them; then those that have changed, been made or removed
// since the round before, again and again. Each target gets its own rows only. The last round is
// sent by SendLast(), when the server answers no more requests.
//
// Thread-safe, but for the order of StopFollowing() and SendLast().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/placement.h"
#include "base/status.h"
#include "net/channel.h"
#include "store/embedding_store.h"
#include "store/store_snapshot.h"

namespace persia::server {

class RowTransfer {
 public:
  struct Target {
    std::string address;
    uint64_t incarnation = 0;
  };
  struct Options {
    uint64_t incarnation = 0;  // of this server
    uint32_t index = 0;        // of this server among the old ones
    std::vector<Target> targets = {};
    Placement placement;  // of the targets
    // What the copy may take of processors while the store is trained; 0: no limit.
    double max_processors = 0;
    // A target that does not take a piece for so long fails the transfer.
    std::chrono::milliseconds deadline{10'000};
  };
  enum class State : uint8_t { kCopying, kFollowing, kHandedOver, kFailed };
  struct Progress {
    State state = State::kCopying;
    uint64_t num_bytes = 0;
    uint64_t num_rows = 0;  // removals included
    // Of the last round of changes; 0 before the first has ended.
    std::chrono::duration<double> round_time{0};
    Status failure;
  };

  // Remembers the changes of the store from now on, and starts to copy. The store must outlive it.
  // kFailedPrecondition: a dump or a loading is under way.
  static StatusOr<std::unique_ptr<RowTransfer>> Begin(store::EmbeddingStore& store,
                                                      const Options& options);
  // The store remembers no changes any more.
  ~RowTransfer();

  Progress progress() const;
  // Returns when the present round has been sent; no other one begins. kFailedPrecondition: not all
  // rows have been copied yet. A transfer that has failed fails again.
  Status StopFollowing();
  // The last round, then the config, the keys of updates and the end. Nothing may change the store
  // meanwhile.
  Status SendLast(const std::vector<std::byte>& updates);

 private:
  class Lane;
  using Clock = std::chrono::steady_clock;

  RowTransfer(store::EmbeddingStore* store, const Options& options);
  void Run(std::unique_ptr<store::StoreSnapshot> all_rows);
  Status SendChanges(double max_processors);
  Status SendConfig();
  Status SendRows(store::StoreSnapshot* rows, double max_processors);
  Status Add(const store::StoreSnapshot::Batch& batch);
  // Waits until each target has everything.
  Status Drain();
  // Of the lanes, counts `status` as the failure of the whole.
  Status Note(Status status);

  store::EmbeddingStore& store_;
  const Options options_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // by target
  uint64_t next_max_changes_ = 0;
  bool has_sent_config_ = false;
  std::atomic<uint64_t> num_bytes_ = 0;
  std::atomic<uint64_t> num_rows_ = 0;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable stops_;
  bool is_stopping_ = false;
  State state_ = State::kCopying;
  std::chrono::duration<double> round_time_{0};
  Status failure_;
  std::thread thread_;
};

}  // namespace persia::server

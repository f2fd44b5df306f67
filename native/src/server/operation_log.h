// OperationLog: the standby's end of the replication of a parameter server (ADR 41): operations
// that the primary has sent and this server has not applied yet.
//
// The standby applies its log in the order of the numbers, behind the primary, once it has the copy
// of the primary's rows that the log continues.
//
// An operation that fails here has succeeded at the primary. Then the rows differ, so the standby
// is unfit: it refuses every message, and never takes over.
//
// Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/buffer.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "net/types.h"

namespace persia::server {

class OperationLog {
 public:
  enum class State : uint8_t {
    kFollowing,
    kTakenOver,  // this server is the primary now
    kRenounced,  // it has agreed never to take over
    kUnfit,      // its rows differ from the primary's
  };
  struct Options {
    uint64_t standby = 0;                    // incarnation of this server
    uint64_t max_bytes = uint64_t{1} << 30;  // of operations that wait
    std::chrono::milliseconds lease{1000};   // that the primary counts with
  };
  // Runs an operation, or takes over a piece of the copy, and says whether that succeeded.
  using Apply = std::function<Status(uint8_t method, const Buffer& body)>;
  using TakeCopy = std::function<Status(ReplicateKind kind, std::span<const std::byte> body)>;

  // `apply` runs on a thread of this object, one operation after the other.
  OperationLog(const Options& options, Apply apply, TakeCopy take_copy);
  ~OperationLog();

  // The incarnation whose messages are accepted from now on. The standby is unfit where it has
  // accepted a message of another one before: it ends, and a new server follows.
  void Follow(uint64_t primary);
  // Returns when the message has been dealt with; an operation is only stored. A repeated one is
  // accepted. Waits for the operation before it, never for room: without, it says kUnavailable.
  // kFailedPrecondition: the message names others than these two servers, or the state is not
  // kFollowing.
  Status Take(const ReplicateRequest& message, net::Clock::time_point deadline);

  // Accepts nothing more, and returns when all of the log are applied. kUnavailable: the lease of
  // the primary may still be valid; not asked where the primary `has_ended`. kFailedPrecondition:
  // this server must not take over. One that fails in an operation of the log fails again.
  Status TakeOver(bool has_ended);
  // Whether this server will never take over. False: it has.
  bool Renounce();

  State state() const;
  // Why the standby is unfit; OK otherwise.
  Status failure() const;
  bool has_copy() const;
  // Since the last message of the primary; the longest time there is before the first.
  std::chrono::duration<double> silent_for() const;
  uint64_t num_received() const;
  uint64_t num_waiting() const;

 private:
  struct Operation {
    uint8_t method;
    Buffer body;
  };

  // Require mutex_.
  Status CheckMessage(const ReplicateRequest& message) const;
  Status Add(std::unique_lock<std::mutex>* lock, const ReplicateRequest& message,
             net::Clock::time_point deadline);
  void BecomeUnfit(const Status& failure);

  Status BeginTakeOver(bool has_ended);
  void ApplyAll();
  void Join();

  const Options options_;
  const Apply apply_;
  const TakeCopy take_copy_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  State state_ = State::kFollowing;
  bool has_ended_ = false;  // the thread is to end once the log is empty
  bool has_copy_ = false;
  uint64_t primary_ = 0;
  std::optional<net::Clock::time_point> heard_at_;
  std::deque<Operation> operations_;
  uint64_t bytes_ = 0;
  uint64_t num_received_ = 0;
  Status failure_;
  std::mutex copy_mutex_;  // one piece of the copy at a time
  std::mutex join_mutex_;  // serialises Join()
  std::thread thread_;
};

}  // namespace persia::server

// StandbyLink and OperationLog: the two ends of the replication of a parameter server (ADR 41).
//
// A store is deterministic: the same operations in the same order give the same bits. The primary
// applies one operation at a time and sends each that succeeded to its standby, numbered. It
// answers its caller when the standby has the operation. The standby applies its log in the order
// of the numbers, behind the primary.
//
// Both are thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/buffer.h"
#include "base/metrics.h"
#include "base/status.h"
#include "net/channel.h"
#include "net/types.h"

namespace persia::server {

// The primary's end.
class StandbyLink {
 public:
  enum class State : uint8_t {
    kAlone,        // operations are applied here only
    kReplicating,  // and sent to the standby
    kBroken,       // the standby does not answer: operations wait for Release()
  };

  // A standby that does not take an operation for so long breaks the link.
  explicit StandbyLink(std::chrono::milliseconds patience) : patience_(patience) {}

  // Sends the operations that follow to the server at `address`, whose log is empty.
  // kFailedPrecondition: there is a standby already, or operations came before it.
  Status Attach(const std::string& address);
  // Continues alone. Only when the standby will never take over.
  void Release();

  // Runs `apply`, and returns its reply when the standby has the operation. kUnavailable: the link
  // broke, and nobody has released it by the deadline; the caller repeats the operation, here or at
  // the standby.
  StatusOr<Segments> Run(const MethodId& method, const Buffer& body,
                         const net::CallContext& context,
                         const std::function<StatusOr<Segments>()>& apply);

  State state() const { return state_.load(); }

 private:
  bool AwaitMended(std::unique_lock<std::mutex>& lock, net::Clock::time_point deadline);

  const std::chrono::milliseconds patience_;
  std::mutex order_;  // held while an operation is applied and numbered; guards what follows
  std::condition_variable mended_;
  std::atomic<State> state_ = State::kAlone;  // written under order_
  std::shared_ptr<net::Channel> channel_;     // null: there is no standby
  uint64_t next_ = 0;
  bool has_changed_ = false;  // an operation was applied without a standby
};

// The standby's end: operations that the primary has sent and this server has not applied yet.
class OperationLog {
 public:
  using Apply = std::function<void(uint8_t method, const Buffer& body)>;

  // `apply` runs on a thread of this object, one operation after the other.
  OperationLog(uint64_t max_bytes, Apply apply);
  ~OperationLog();

  // Returns when the operation is in the log; at once for one that was there before. Waits for its
  // predecessor, and for room. kFailedPrecondition: Finish() was called.
  Status Add(uint64_t number, uint8_t method, Buffer body, net::Clock::time_point deadline);
  // Accepts no more operations, and returns when all of the log are applied. Idempotent.
  void Finish();

  uint64_t num_received() const;
  uint64_t num_waiting() const;

 private:
  struct Operation {
    uint8_t method;
    Buffer body;
  };

  void ApplyAll();

  const uint64_t max_bytes_;
  const Apply apply_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Operation> operations_;
  uint64_t bytes_ = 0;
  uint64_t num_received_ = 0;
  bool is_finished_ = false;
  std::mutex finish_mutex_;  // serialises Finish()
  std::thread thread_;
};

}  // namespace persia::server

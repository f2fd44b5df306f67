// StandbyLink: the primary's end of the replication of a parameter server (ADR 41).
//
// A store is deterministic: the same operations in the same order give the same bits. The primary
// applies one operation at a time and sends each that succeeded to its standby, numbered. It
// answers its caller when the standby has the operation (operation_log.h).
//
// A lease decides who may answer. Each message that the standby accepts extends it, and the standby
// takes over only after it has certainly expired. A primary without a valid lease refuses every
// request, reads too: so one that was frozen, or cut off, serves nothing when it returns.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "net/channel.h"
#include "net/types.h"
#include "server/row_copy.h"

namespace persia::server {

// How long a primary answers after its standby has accepted a message. Within the pause that a
// failure may cost; a shorter one stalls primaries on busy hosts, which is harmless.
std::chrono::milliseconds LeaseOf(std::chrono::milliseconds deadline);

class StandbyLink {
 public:
  enum class State : uint8_t {
    kAlone,        // operations are applied here only
    kReplicating,  // and sent to the standby
    kBroken,       // the standby lacks operations: all requests wait for Release() or Fence()
    kFenced,       // another server has this one's place: nothing is answered any more
  };
  struct Options {
    uint64_t incarnation = 0;  // of this server
    // A standby that does not accept a message for so long breaks the link.
    std::chrono::milliseconds deadline{10'000};
    // Operations that wait for the standby at once. Fewer than the handler threads of the server:
    // a frozen standby must not hold those that answer others.
    uint32_t max_waiting = 6;
  };
  // Begins the copy of the rows at the moment of the call.
  using BeginCopy = std::function<StatusOr<std::unique_ptr<RowCopy>>()>;

  StandbyLink(const Options& options, BeginCopy begin_copy);
  ~StandbyLink();

  // Copies the rows to the server at `address`, and sends it the operations that follow.
  // kFailedPrecondition: there is a standby already, this server is fenced, or a dump is under way.
  Status Attach(const std::string& address, uint64_t standby);
  // Continues alone. Only when the standby will never take over.
  void Release();
  // Answers nothing any more; `reason` is told to callers.
  void Fence(const std::string& reason);

  // Whether this server may answer a request now: one atomic read while all is well.
  Status CheckServes() const;
  // Runs `apply`, and returns its reply when the standby has the operation. kUnavailable: it could
  // not be sent; the caller repeats it, here or at the standby. An exception of `apply`, or
  // kInternal, breaks the link: the operation may be applied in part.
  StatusOr<Segments> Run(const MethodId& method, const Buffer& body,
                         const std::function<StatusOr<Segments>()>& apply);

  State state() const { return state_.load(); }
  bool is_copying() const { return is_copying_.load(); }
  // Why the link broke or was fenced; empty before.
  std::string reason() const;

 private:
  using Clock = net::Clock;
  using ChannelPtr = std::shared_ptr<net::Channel>;

  ReplicateRequest Message(uint64_t standby, ReplicateKind kind,
                           std::span<const std::byte> body) const;
  // The threads of a link. They never take order_: the operation that has it may wait for the copy
  // to make room, or take longer than the lease.
  void SendCopy(const ChannelPtr& channel, uint64_t standby, std::unique_ptr<RowCopy> copy);
  void SendHeartbeats(const ChannelPtr& channel, uint64_t standby);
  // Requires order_.
  StatusOr<Segments> ApplyHere(const std::function<StatusOr<Segments>()>& apply);
  void ExtendLease(Clock::time_point sent_at);
  // Unless the link is another one by now.
  void Break(const ChannelPtr& channel, const Status& reason);
  // Ends the threads and calls of the present link.
  void Detach(State state, const std::string& reason);

  const Options options_;
  const std::chrono::milliseconds lease_;
  const BeginCopy begin_copy_;
  std::atomic<State> state_ = State::kAlone;  // written under link_
  std::atomic<bool> is_copying_ = false;
  std::atomic<Clock::rep> lease_until_ = 0;

  std::mutex lifecycle_;              // serialises Attach, Release and Fence; taken before order_
  std::vector<std::thread> threads_;  // guarded by lifecycle_

  std::mutex order_;  // held while an operation is applied and numbered; guards what follows
  std::condition_variable has_place_;
  uint64_t standby_ = 0;
  uint64_t next_ = 0;
  uint32_t num_waiting_ = 0;
  ChannelPtr channel_;  // null: there is no standby; written under both locks

  mutable std::mutex link_;  // taken after order_, and never held for long; guards what follows
  std::condition_variable link_changed_;
  std::string reason_;
};

}  // namespace persia::server

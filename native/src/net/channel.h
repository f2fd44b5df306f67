// Channel: calls to one peer, which may restart and come back under another address.
//
// Call() may be used from any number of threads at once. Connections are opened on demand, kept and
// shared. A call whose connection breaks, or whose peer answers kUnavailable, is repeated with
// exponential backoff (jittered, at most 500 ms) until the deadline: every method of this system is
// idempotent, by key where it changes something. SetAddress() may come at any time, also while
// calls wait. Each wait has a deadline. Failures name the peer: "embedding-worker 0 at
// 127.0.0.1:8887: connection refused".
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/buffer.h"
#include "base/status.h"
#include "net/types.h"

namespace persia::net {

class Channel {
 public:
  struct Options {
    std::string peer;  // for messages: "parameter-server 1"
    uint64_t max_body_bytes = 1ull << 30;
  };

  explicit Channel(Options options);
  ~Channel();  // fails what is pending with kUnavailable
  Channel(const Channel&) = delete;

  // "host:port". Until the first call of this, calls wait (until their deadline).
  void SetAddress(const std::string& address);

  // Fails with kUnavailable what is pending and every later call. From any thread; does not wait.
  void Close();

  // Sends the segments as one frame and waits for the answer's body. `segments` must stay as they
  // are until it returns.
  StatusOr<Buffer> Call(const MethodId& method, const Segments& segments,
                        Clock::time_point deadline);

  // The same without blocking the caller, for fan-out:
  // `done` runs exactly once, on the channel's own thread, and must not block for long.
  void CallAsync(const MethodId& method, Segments segments, Clock::time_point deadline,
                 std::function<void(StatusOr<Buffer>)> done);

  ChannelStats stats() const;
  const std::string& peer() const { return peer_; }

 private:
  // Asio stays out of this header. The channel's thread owns the Impl too, so that a callback may
  // destroy the channel.
  class Impl;
  const std::string peer_;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace persia::net

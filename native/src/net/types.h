// Plain data types that the server's and the client's end share.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/duration_stats.h"
#include "base/method.h"
#include "base/metrics.h"
#include "net/security.h"

namespace persia::net {

// Deadlines of this layer are points of this clock: on the wire a deadline is the time that is
// left, so that the clocks of two hosts are never compared.
// Not adjusted by the host, so that a deadline is neither stretched nor cut by a change of the
// time.
using Clock = std::chrono::steady_clock;

// What a handler knows beside the body. A handler that calls others passes the deadline on, less
// the time that it needs itself.
struct CallContext {
  Clock::time_point deadline;  // past it nobody waits for the answer any more
  Role caller = Role::kNone;   // proved; kNone where this process has no identity
};

// Returns the reply's body, or a Status that reaches the caller with its code and message. Runs on
// a thread of the server, several at once.
// It may block, up to the deadline: other requests go to other threads. It may throw; the caller
// then gets kInternal.
using Handler =
    std::function<StatusOr<Segments>(const Buffer& request, const CallContext& context)>;

// Bounds of one server. Requests beyond a bound wait, and their senders with them; none is dropped.
struct ServerOptions {
  // Threads that are left to read and write while all handlers are busy. At least 1.
  uint32_t num_io_threads = 1;
  // Handlers that run at once; at least 1. More than processors are of use where handlers wait for
  // other servers.
  uint32_t num_handler_threads = 2;
  uint64_t max_body_bytes = 1ull << 30;
  // Of request bodies that were read and not answered, of all connections. One body may exceed it,
  // so that a large one always gets through.
  uint64_t max_inflight_bytes = 4ull << 30;
  // A request body of which less than a step arrives in so long closes its connection.
  std::chrono::milliseconds body_patience = std::chrono::seconds(10);
  // A connection whose client has not proved its role after so long is closed.
  std::chrono::milliseconds handshake_patience = std::chrono::seconds(5);
  // Connections at once; 0: as many as the process's limit of descriptors permits, less a reserve.
  uint32_t max_connections = 0;
  Security security = Security::OfProcess();
};

// What a Channel counts: calls made and pending, retries, connections, bytes.
struct ChannelStats {
  static constexpr const char* kLabel = "peer";
  std::string name;
  Metrics metrics;
  DurationStats::Snapshot calls;  // their durations
};

}  // namespace persia::net

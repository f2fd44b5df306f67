// Plain data types that the server's and the client's end share.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/duration_stats.h"
#include "base/method.h"

namespace persia::net {

using Clock = std::chrono::steady_clock;

struct CallContext {
  Clock::time_point deadline;  // past it nobody waits for the answer any more
};

// Returns the reply's body, or a Status that reaches the caller with its code and message. Runs on
// a thread of the server, several at once.
using Handler =
    std::function<StatusOr<Segments>(const Buffer& request, const CallContext& context)>;

struct ServerOptions {
  std::string host = "127.0.0.1";  // loopback unless told otherwise
  uint16_t port = 0;               // 0: chosen by the system
  uint32_t num_io_threads = 1;
  uint32_t num_handler_threads = 2;
  uint64_t max_body_bytes = 1ull << 30;
  uint64_t max_inflight_bytes = 4ull << 30;
  // A request body of which less than a step arrives in so long closes its connection.
  std::chrono::milliseconds body_patience = std::chrono::seconds(10);
};

// What a Channel counts since it was made.
struct ChannelStats {
  std::string peer;
  uint64_t num_calls = 0;
  uint64_t num_retries = 0;     // requests sent again, after a broken connection or a refusal
  uint64_t num_connects = 0;    // connections made
  uint64_t num_sent_bytes = 0;  // bodies, every time they are sent
  uint64_t num_received_bytes = 0;
  uint64_t num_pending = 0;  // calls under way now
  DurationStats::Snapshot calls;
};

}  // namespace persia::net

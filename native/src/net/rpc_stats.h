// What a Server and a Channel count about themselves, since they were made.
#pragma once

#include <cstdint>
#include <string>

#include "base/duration_stats.h"

namespace persia::net {

struct ServerStats {
  uint64_t num_requests = 0;        // handled, whatever came of it
  uint64_t num_failed = 0;          // of them, answered with an error
  uint64_t num_received_bytes = 0;  // bodies
  uint64_t num_sent_bytes = 0;
  uint64_t num_connections = 0;  // open now
  uint64_t num_running = 0;      // handlers that run now
  uint64_t num_in_line = 0;      // requests that wait for a handler to end
};

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

// Server: accepts framed RPC connections and runs handlers on its threads.
//
// Thread-safety: up to `num_handler_threads` handlers run at once; several requests of
// one connection may be in progress at once and are answered in the order they finish. Register all
// handlers before Start(). Bounded: at most `max_inflight_bytes` of request bodies are held; past
// that the server stops reading (the sender feels it as back-pressure), it never drops.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "net/message.h"
#include "net/rpc_stats.h"

namespace persia::net {

using Clock = std::chrono::steady_clock;

struct CallContext {
  Clock::time_point deadline;  // past it nobody waits for the answer any more
};

// Returns the reply's body, or a Status that reaches the caller with its code and message.
using Handler = std::function<StatusOr<Parts>(const Buffer& request, const CallContext& context)>;

class Server {
 public:
  struct Options {
    std::string host = "127.0.0.1";  // loopback unless told otherwise
    uint16_t port = 0;               // 0: chosen by the system
    uint32_t num_io_threads = 1;
    uint32_t num_handler_threads = 2;
    uint64_t max_body_bytes = 1ull << 30;
    uint64_t max_inflight_bytes = 4ull << 30;
  };

  explicit Server(Options options);
  ~Server();  // Stop()s
  Server(const Server&) = delete;

  void Handle(Method method, Handler handler);
  // Binds and listens; returns the port. kIOError names
  // host and port ("address already in use", ...).
  StatusOr<uint16_t> Start();
  // Stops accepting and reading, lets running handlers finish and their answers leave until
  // `timeout`, then closes. Idempotent.
  void Stop(std::chrono::milliseconds timeout = std::chrono::seconds(10));

  ServerStats stats() const;
  // The time in the handler of each method, by the method's name; as long as the server lives.
  std::vector<const DurationStats*> durations() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::net

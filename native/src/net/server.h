// Server: accepts framed RPC connections and runs handlers on its threads.
//
// Thread-safety: up to `num_handler_threads` handlers run at once. Several requests of one
// connection may be in progress at once and are answered in the order they finish. Register all
// handlers before Start().
//
// Bounds: at most `max_inflight_bytes` of request bodies are held. Past that the server stops
// reading, which the sender feels as back-pressure; it never drops a request. Connections are
// bounded too. Those whose clients have proved nothing yet have a small bound of their own, in all
// and by host, past which one is closed: strangers cannot keep a client of the job out.
//
// Threads: all are alike. Each waits for an event and does everything that follows from it, up to
// running the handler and writing its reply. At most num_handler_threads of them are in handlers at
// a time, so num_io_threads are always left to read and write; a request above that waits in line
// for a handler to end. README.md says why.
//
// Handlers are registered by method: see net/rpc.h for typed ones.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/metrics.h"
#include "base/status.h"
#include "net/connection.h"
#include "net/types.h"
#include "net/unproven.h"

namespace persia::net {

class Server {
 public:
  using Options = ServerOptions;

  // Opens nothing. A server that is never started may be destroyed like any other.
  explicit Server(Options options);
  ~Server();  // Stop()s
  Server(const Server&) = delete;

  // A second handler of a method replaces the first. Methods without one are answered with
  // kInvalidArgument.
  void Handle(const MethodId& method, Handler handler);
  // Binds and listens; returns the port, which the system chooses where `port` is 0. kIOError names
  // host and port ("address already in use"), after which another Start() may be tried.
  // `host` is a name or an address; "0.0.0.0" and "::" listen on all. A server is started once:
  // kFailedPrecondition otherwise.
  StatusOr<uint16_t> Start(const std::string& host = "127.0.0.1", uint16_t port = 0);
  // Stops accepting and reading, lets running handlers finish and their answers leave until
  // `timeout`, then closes. Idempotent.
  // Requests that still wait at the timeout are dropped unanswered: their callers see the
  // connection end and repeat them elsewhere. A handler that runs past it is waited for by the
  // destructor.
  void Stop(std::chrono::milliseconds timeout = std::chrono::seconds(10));

  // Adds what this server counts, with keys that begin with "rpc_".
  // From any thread, also before Start() and after Stop().
  void AddMetrics(Metrics* metrics) const;
  // The time in the handler of each method, by the method's name; as long as the server lives.
  std::vector<const DurationStats*> durations() const;

 private:
  // Tags of events: the listener's, then one for each connection. They are never used again, so a
  // late event cannot reach another connection.
  static constexpr uint64_t kListenerTag = Poller::kFirstFreeTag;
  using Connections = std::unordered_map<uint64_t, std::shared_ptr<Connection>>;

  StatusOr<uint16_t> Listen(const std::string& host, uint16_t port);
  // One of the threads: waits, and does what follows from each event.
  void HandleEvents();
  // On any of the threads, several at once, but one at a time for each descriptor.
  void OnEvent(const Poller::Event& event);
  void Accept();
  void AddConnection(UniqueFd socket, const std::string& host, uint16_t port);
  // Requires mutex_. The connection that has to make room for another of `host`, or none.
  std::shared_ptr<Connection> UnprovenToClose(const std::string& host) const;
  // True: a stranger has given a descriptor back, so that the next attempt may succeed.
  bool OnAcceptFailed(int error);
  void OnTimer();
  void OnClosed(uint64_t tag);
  // A copy, because a connection that is closed takes mutex_ to leave the map.
  Connections OpenConnections();

  // Requests above num_handler_threads wait in line, and the threads that are in handlers take
  // them.
  // May run the handler of this request and then of others before it returns.
  void Run(Request request);
  // Never throws. A request whose time has passed is refused without its handler: no caller awaits
  // the answer.
  StatusOr<Segments> RunHandler(const Request& request);
  void Count(const Request& request, const StatusOr<Segments>& reply);
  void Audit(const Request& request, const StatusOr<Segments>& reply);

  // What connections share with the server. Declared first: it is destroyed after all that uses it.
  ServerState state_;
  std::vector<std::thread> threads_;

  std::mutex lifecycle_mutex_;  // serialises Start and Stop
  bool started_ = false;
  bool stopped_ = false;

  std::array<std::unique_ptr<DurationStats>, 256> durations_;  // by method number
  DurationStats queue_times_{"queue of requests"};             // of those that had to wait
  CounterList counters_;
  Counter num_requests_{counters_,
                        {"rpc_num_requests", "persia_rpc_requests", "Requests handled."}};
  Counter num_failed_{
      counters_,
      {"rpc_num_failed", "persia_rpc_failed_requests", "Requests answered with an error."}};
  // The sign of an overloaded server: callers wait for handlers longer than their deadlines allow.
  Counter num_late_{counters_,
                    {"rpc_num_late", "persia_rpc_late_requests",
                     "Requests refused because their deadline passed before a handler was free."}};
  Counter num_received_bytes_{
      counters_, {"rpc_num_received_bytes", "persia_rpc_request_bytes", "Bytes of requests."}};
  Counter num_sent_bytes_{counters_,
                          {"rpc_num_sent_bytes", "persia_rpc_reply_bytes", "Bytes of replies."}};
  Counter num_refused_{counters_,
                       {"rpc_num_refused_connections", "persia_rpc_refused_connections",
                        "Connections and requests refused for their credentials or role."}};
  Counter num_crowded_out_{counters_,
                           {"rpc_num_crowded_out", "persia_rpc_crowded_out_connections",
                            "Connections closed because there were too many."}};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable connection_closed_;
  Connections connections_;  // by their tags
  UnprovenConnections unproven_;
  uint32_t max_connections_ = 0;  // set by Start()
  uint64_t next_tag_ = kListenerTag + 1;
  UniqueFd listener_;
  Clock::time_point accept_at_ = Clock::time_point::max();  // max: whenever a client comes
  bool stopping_ = false;

  mutable std::mutex run_mutex_;  // guards what follows
  uint32_t num_running_ = 0;
  std::deque<Request> in_line_;  // bounded by the byte budget and each connection's own limit
  bool run_no_more_ = false;
};

}  // namespace persia::net

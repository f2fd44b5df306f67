// net::Server over the Wire: the interface and the rules of src/net/server.h, without sockets.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "base/status.h"
#include "net/types.h"
#include "wire.h"

namespace persia::net {

class Server {
 public:
  using Options = ServerOptions;

  explicit Server(Options options)
      : options_(std::move(options)), process_(simulation::World::Get().current_process()) {}
  ~Server() { Stop(std::chrono::seconds(10)); }
  Server(const Server&) = delete;

  void Handle(const MethodId& method, Handler handler) {
    handlers_[method.number] = std::move(handler);
  }
  StatusOr<uint16_t> Start(const std::string& host = "127.0.0.1", uint16_t port = 0);
  void Stop(std::chrono::milliseconds timeout = std::chrono::seconds(10));
  void AddMetrics(Metrics*) const {}
  std::vector<const DurationStats*> durations() const { return {}; }

  struct Request {
    uint8_t method;
    Buffer body;
    simulation::Time deadline;
    std::function<void(StatusCode, Buffer)> reply;
  };
  // As the server's process.
  void OnRequest(Request request);

 private:
  void RunHandlers();
  StatusOr<Segments> RunHandler(const Request& request);

  const Options options_;
  const int process_;
  std::map<uint8_t, Handler> handlers_;
  std::string address_;
  std::deque<Request> in_line_;
  uint32_t num_running_ = 0;
};

}  // namespace persia::net

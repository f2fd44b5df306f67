// GrpcServer: calls of gRPC over HTTP/2, plain or by TLS, on one thread.
//
// It frames messages and knows nothing of what they mean: a CallHandler does, which is called on
// the server's thread and answers from any thread. HTTP/2 is libnghttp2's; bounds are ours.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "net/listener.h"
#include "net/poller.h"
#include "serving/grpc_call.h"
#include "serving/grpc_connection.h"

namespace persia::serving {

class GrpcServer {
 public:
  // `handler` must outlive the server.
  GrpcServer(GrpcOptions options, CallHandler* handler);
  GrpcServer(const GrpcServer&) = delete;
  ~GrpcServer();

  // The port, a free one for 0. kIOError: the address cannot be used. Once.
  StatusOr<uint16_t> Start(const std::string& host, uint16_t port);
  // No new connections and calls; returns when the calls under way are answered, or after
  // `timeout`, when they are cut off. Thread-safe.
  void Stop(std::chrono::milliseconds timeout);

  // Of a call that has ended these are ignored. Thread-safe.
  void Send(CallId call, std::string message);
  void Finish(CallId call, GrpcCode code, std::string text);
  // The only message of a call, and its end. Sent no earlier than with the next Wake, Send or
  // Finish: a thread that replies to many calls would be interrupted by the first one.
  void Wake();
  void Reply(CallId call, std::string message);

 private:
  struct Action {
    CallId call;
    bool has_message;
    bool has_end;
    GrpcCode code;
    std::string bytes;  // the message, or the text of an error
  };

  void Run();
  void Post(Action action, bool wakes);
  void OnEvent(const net::Poller::Event& event);
  void Accept(size_t listener);
  void ArmListeners();
  bool CloseIdle();
  bool OnAcceptFailed(size_t listener, int error);
  void TakeActions();
  void Apply(Action action);
  void FlushTouched();
  void OnTimer();
  void Remove(uint64_t tag);
  void RestAfterRefusals();
  void BeginDrain();

  GrpcShared shared_;
  net::Poller poller_;
  std::vector<net::Listener> listeners_;  // one of each address
  uint32_t max_connections_ = 0;
  net::UniqueFd wake_;  // an eventfd
  std::thread thread_;
  std::atomic<std::thread::id> own_id_;

  // Of the thread alone.
  std::unordered_map<uint64_t, std::unique_ptr<GrpcConnection>> connections_;
  std::unordered_set<uint64_t> touched_;  // may have something to write
  uint64_t next_tag_ = 0;
  net::Clock::time_point accept_at_ = net::Clock::time_point::max();
  net::Clock::time_point overloaded_until_;
  bool is_draining_ = false;

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  std::vector<Action> actions_;
  bool is_woken_ = false;  // the thread will look at them
  bool stopping_ = false;
  bool has_ended_ = false;
  net::Clock::time_point cut_off_at_ = net::Clock::time_point::max();
};

}  // namespace persia::serving

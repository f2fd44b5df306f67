// Front: the port for predictions. Plain ModelInfer requests are read, queued and answered here,
// without Python; every other call is handed to Python as events.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "serving/answered_requests.h"
#include "serving/draw.h"
#include "serving/grpc_call.h"
#include "serving/grpc_server.h"
#include "serving/infer_request.h"
#include "serving/request_counts.h"
#include "serving/request_queue.h"

namespace persia::serving {

// Fixed when the port is opened. Only the draws change afterwards: Python sets their shares while
// requests are drawn, and both sides draw by the ID of the request, so that they agree.
struct FrontOptions {
  GrpcOptions grpc;
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);  // of requests without a deadline
  // SHA-256 of the token that requests need to be answered without Python; none: no token is.
  std::optional<std::array<unsigned char, 32>> token_digest;
  // Plain requests that Python is to answer: those that ask for no version, and any. Null: none.
  std::shared_ptr<const Draw> canary;
  std::shared_ptr<const Draw> shadow;
  std::shared_ptr<AnsweredRequests> log;  // null: none
};

// What happened to a call that Python answers.
// Events of one call keep their order: kCall, its messages, kEnd when the client sends no more,
// kClosed as the last one. Python may have finished the call before any of them: what it sends for
// a closed call is dropped.
struct CallEvent {
  enum class Kind : uint8_t { kCall, kMessage, kEnd, kClosed };
  Kind kind;
  CallId call;
  CallHead head;  // of kCall
  GrpcMessage message = {};
};

// Thread-safe. Requests that are still computed when it is destroyed are answered into the void.
// The native half of `persia-launcher serve`. Python owns it, and it shares the queue with the
// threads that compute batches. Three kinds of threads call it: the server's thread (the
// CallHandler functions, which must not block it), the threads that compute (InferCall), and the
// thread of Python's event loop (TakeEvents, Send, Finish).
//
// Each ModelInfer call is counted once, whatever ends it: an answer, a refusal, its deadline, or a
// client that left. Calls of Python are counted there.
class Front : private CallHandler {
 public:
  Front(FrontOptions options, std::shared_ptr<RequestQueue> queue,
        std::shared_ptr<RequestCounts> counts);
  ~Front() override;

  // The port, a free one for 0. Requests may arrive before it returns: set the inputs first if they
  // are known.
  StatusOr<uint16_t> Start(const std::string& host, uint16_t port);
  void Stop(std::chrono::milliseconds timeout) { server_.Stop(timeout); }
  // What plain requests have from now on; null: all go to Python.
  void SetInputs(std::shared_ptr<const ModelInputs> inputs);

  // Readable while there are events.
  int events_fd() const { return events_ready_.get(); }
  // Takes all of them, so that one wake-up of Python serves many calls. Calls are in the order of
  // their numbers. Never blocks; empty where another call took them.
  std::vector<CallEvent> TakeEvents();
  void Send(CallId call, std::string message) { server_.Send(call, std::move(message)); }
  void Finish(CallId call, GrpcCode code, std::string text) {
    server_.Finish(call, code, std::move(text));
  }

 private:
  // Both may outlive the Front: threads that compute hold the first, and it holds the second.
  class InferCall;
  class Outlet;

  // A ModelInfer call that Python does not know.
  struct Infer {
    CallHead head;
    std::optional<GrpcMessage> message;
    net::Clock::time_point deadline;
    RequestQueue::Place place;             // in the queue, until its message has arrived
    std::shared_ptr<InferCall> submitted;  // null: its message has not arrived
    bool is_refused = false;               // and counted
  };

  // Decides by the header fields alone, before the client sends its message: an overloaded server
  // must not pay for messages that it refuses (ADR 55).
  CallVerdict OnCall(CallId call, const CallHead& head) override;
  void OnMessage(CallId call, GrpcMessage message) override;
  void OnEnd(CallId call) override;
  void OnLate(CallId call) override;
  void OnRefused(CallId call, GrpcCode code) override;
  void OnClosed(CallId call) override;

  // Canary and shadow copies are computed by Python's classes, so a request that is drawn for one
  // of them goes there whole.
  bool IsForPython(const InferRequest& request, const std::string& draw_id) const;
  bool MayBeDrawn() const;
  bool HasToken(const CallHead& head) const;
  // From a call that was read here to one that Python answers: Python sees
  // the events that it would have seen from the beginning.
  void HandOver(CallId call, Infer* infer);
  // For what is wrong with a request beyond doubt. Anything less clear goes to Python, which
  // explains it.
  void Refuse(CallId call, net::Clock::time_point arrived, const Status& status);
  void Push(CallEvent event);
  void PushClosed(CallId call);
  std::shared_ptr<const ModelInputs> inputs();

  const FrontOptions options_;
  const std::shared_ptr<RequestQueue> queue_;
  const std::shared_ptr<RequestCounts> counts_;
  const std::shared_ptr<Outlet> outlet_;
  std::unordered_map<CallId, Infer> infers_;  // of the server's thread alone

  std::mutex mutex_;  // guards what follows
  std::shared_ptr<const ModelInputs> inputs_;
  // That Python has not taken. At most those of the calls that are open, and one of each call that
  // Python knows.
  std::map<CallId, std::vector<CallEvent>> events_;
  net::UniqueFd events_ready_;  // an eventfd

  GrpcServer server_;  // last: its thread uses all the others
};

}  // namespace persia::serving

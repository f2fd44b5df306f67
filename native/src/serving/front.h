// Front: the port for predictions of one model or several. Plain ModelInfer requests are read,
// queued and answered here, without Python; every other call is handed to Python as events.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
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
};

// A model behind the port.
struct FrontModel {
  std::string name;
  std::shared_ptr<RequestQueue> queue;
  std::shared_ptr<RequestCounts> counts;
  // Plain requests that Python is to answer: those that ask for no version, and any. Null: none.
  std::shared_ptr<const Draw> canary = nullptr;
  std::shared_ptr<const Draw> shadow = nullptr;
  std::shared_ptr<AnsweredRequests> log = nullptr;  // null: none
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
  // `counts`: of requests that end before they tell their model, or name none of `models`.
  Front(FrontOptions options, std::vector<FrontModel> models,
        std::shared_ptr<RequestCounts> counts);
  ~Front() override;

  // The port, a free one for 0. Requests may arrive before it returns: set the inputs first if they
  // are known.
  StatusOr<uint16_t> Start(const std::string& host, uint16_t port);
  void Stop(std::chrono::milliseconds timeout) { server_.Stop(timeout); }
  // What plain requests of the model `inputs->model_name` have from now on. Before the first call
  // for a model, all its requests go to Python.
  void SetInputs(std::shared_ptr<const ModelInputs> inputs);

  // kInvalidArgument: a ModelInfer message, inflated by Python, has too many inputs or outputs. A
  // few bytes inflate to millions, each of them an object for Python's parser.
  Status CheckTensors(std::span<const std::byte> message) const;

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
    const FrontModel* model = nullptr;     // null: its message has not told, or names none
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

  StatusOr<RequestQueue::Place> Admit(net::Clock::time_point deadline);
  StatusOr<std::optional<InferRequest>> Read(Infer* infer);
  RequestCounts& CountsOf(const Infer& infer) const;
  bool HasToken(const CallHead& head) const;
  // From a call that was read here to one that Python answers: Python sees
  // the events that it would have seen from the beginning.
  void HandOver(CallId call, Infer* infer);
  // For what is wrong with a request beyond doubt. Anything less clear goes to Python, which
  // explains it.
  void Refuse(CallId call, Infer* infer, const Status& status);
  void Push(CallEvent event);
  void PushClosed(CallId call);
  std::shared_ptr<const ModelInputs> InputsOf(const FrontModel& model);

  const FrontOptions options_;
  const std::vector<FrontModel> models_;
  const std::shared_ptr<RequestCounts> counts_;
  const std::shared_ptr<Outlet> outlet_;
  std::unordered_map<CallId, Infer> infers_;            // of the server's thread alone
  std::atomic<size_t> max_tensors_ = MaxTensorsOf({});  // of a request, for the largest model

  std::mutex mutex_;  // guards what follows
  std::unordered_map<std::string, std::shared_ptr<const ModelInputs>> inputs_;  // by model
  // That Python has not taken. At most those of the calls that are open, and one of each call that
  // Python knows.
  std::map<CallId, std::vector<CallEvent>> events_;
  net::UniqueFd events_ready_;  // an eventfd

  GrpcServer server_;  // last: its thread uses all the others
};

}  // namespace persia::serving

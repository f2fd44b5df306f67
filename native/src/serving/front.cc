#include "serving/front.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

namespace persia::serving {
namespace {

using net::Clock;

constexpr std::string_view kModelInfer = "/inference.GRPCInferenceService/ModelInfer";
constexpr std::string_view kBearer = "Bearer ";

GrpcCode CodeOf(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument: return GrpcCode::kInvalidArgument;
    case StatusCode::kResourceExhausted: return GrpcCode::kResourceExhausted;
    case StatusCode::kUnavailable: return GrpcCode::kUnavailable;
    case StatusCode::kDeadlineExceeded: return GrpcCode::kDeadlineExceeded;
    default: return GrpcCode::kInternal;
  }
}

bool Takes(const Draw* draw, const std::string& id) { return draw != nullptr && draw->Takes(id); }

// Whether several draws of one request have to agree.
bool MayBeDrawn(const FrontModel& model) {
  const auto has_share = [](const Draw* draw) { return draw != nullptr && draw->share() > 0; };
  return has_share(model.canary.get()) || has_share(model.shadow.get()) ||
         (model.log != nullptr && has_share(&model.log->draw()));
}

// Canary and shadow copies are computed by Python's classes, so a request that is drawn for one of
// them goes there whole.
bool IsForPython(const FrontModel& model, bool is_stable, const std::string& draw_id) {
  return (!is_stable && Takes(model.canary.get(), draw_id)) || Takes(model.shadow.get(), draw_id);
}

}  // namespace

// The way from the threads that compute to the server, which may end before they do.
// Its mutex is held while the server is called: Close() then returns only when no thread uses the
// server any more, which the destructor of Front relies on. The server's own mutex is taken below
// it.
class Front::Outlet {
 public:
  explicit Outlet(GrpcServer* server) : server_(server) {}

  template <typename Call>
  void With(Call call) {
    const std::lock_guard lock(mutex_);
    if (server_ != nullptr) call(*server_);
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    server_ = nullptr;
  }

 private:
  std::mutex mutex_;
  GrpcServer* server_;
};

// A request that was submitted, answered by the thread that computes its batch.
class Front::InferCall : public Waiting {
 public:
  // `log`: of those that it is drawn for; null: none.
  InferCall(const Front& front, CallId call, const Infer& infer, InferRequest request,
            std::shared_ptr<AnsweredRequests> log)
      : Waiting(std::move(request.samples), infer.deadline),
        outlet_(front.outlet_),
        held_(infer.message->held),
        counts_(infer.model->counts),
        log_(std::move(log)),
        call_(call),
        arrived_(infer.head.arrived),
        id_(std::move(request.id)),
        positions_(std::move(request.output_positions)) {}

  void Answer(const Prediction& prediction, uint32_t begin) override {
    const size_t num_outputs = prediction.outputs.size();
    for (const uint32_t position : positions_) {
      if (position >= num_outputs) {
        return Fail(GrpcCode::kInvalidArgument, "the model has no output 'output_" +
                                                    std::to_string(position) + "', but " +
                                                    std::to_string(num_outputs) + " of them");
      }
    }
    if (!End(GrpcCode::kOk)) return;
    std::string reply = EncodeInferResponse(prediction, id_, positions_, begin, size());
    outlet_->With([&](GrpcServer& server) { server.Reply(call_, std::move(reply)); });
    if (log_ != nullptr) log_->Offer(shared_samples());
  }
  void Fail(GrpcCode code, const std::string& message) override {
    if (!End(code)) return;
    outlet_->With([&](GrpcServer& server) { server.Finish(call_, code, message); });
  }
  void Deliver() override {
    outlet_->With([](GrpcServer& server) { server.Wake(); });
  }
  // Counts it; false: it was counted already.
  bool End(GrpcCode code) {
    if (ended_.exchange(true)) return false;
    counts_->Add(arrived_, code);
    return true;
  }

 private:
  const std::shared_ptr<Outlet> outlet_;
  const std::shared_ptr<CallBytes> held_;  // while its samples wait, also without its client
  const std::shared_ptr<RequestCounts> counts_;
  const std::shared_ptr<AnsweredRequests> log_;
  const CallId call_;
  const Clock::time_point arrived_;
  const std::string id_;
  const std::vector<uint32_t> positions_;
  std::atomic<bool> ended_ = false;
};

Front::Front(FrontOptions options, std::vector<FrontModel> models,
             std::shared_ptr<RequestCounts> counts)
    : options_(std::move(options)),
      models_(std::move(models)),
      counts_(std::move(counts)),
      outlet_(std::make_shared<Outlet>(&server_)),
      events_ready_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      server_(options_.grpc, this) {}

Front::~Front() { outlet_->Close(); }

StatusOr<uint16_t> Front::Start(const std::string& host, uint16_t port) {
  if (events_ready_.get() < 0) return IOError("no descriptor is left for the port of predictions");
  return server_.Start(host, port);
}

void Front::SetInputs(std::shared_ptr<const ModelInputs> inputs) {
  const std::lock_guard lock(mutex_);
  max_tensors_ = std::max(max_tensors_.load(), MaxTensorsOf(*inputs));
  inputs_[inputs->model_name] = std::move(inputs);
}

std::shared_ptr<const ModelInputs> Front::InputsOf(const FrontModel& model) {
  const std::lock_guard lock(mutex_);
  const auto found = inputs_.find(model.name);
  return found == inputs_.end() ? nullptr : found->second;
}

// ---- events

// The eventfd is written for the first event alone: Python takes all of them at each wake-up, and a
// system call for each would cost more than the event.
void Front::Push(CallEvent event) {
  const std::lock_guard lock(mutex_);
  const uint64_t one = 1;
  if (events_.empty()) {
    [[maybe_unused]] const ssize_t ignored = ::write(events_ready_.get(), &one, sizeof(one));
  }
  events_[event.call].push_back(std::move(event));
}

// Python hears nothing of a call that ended before it took the beginning.
void Front::PushClosed(CallId call) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(call);
    if (found != events_.end() && found->second.front().kind == CallEvent::Kind::kCall) {
      events_.erase(found);
      return;
    }
  }
  Push({.kind = CallEvent::Kind::kClosed, .call = call, .head = {}});
}

std::vector<CallEvent> Front::TakeEvents() {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t ignored = ::read(events_ready_.get(), &count, sizeof(count));
  std::vector<CallEvent> taken;
  for (auto& [call, events] : events_)
    std::move(events.begin(), events.end(), std::back_inserter(taken));
  events_.clear();
  return taken;
}

// ---- calls, on the server's thread

// Digests are compared, in constant time: neither the length of the token nor its first wrong
// character can be measured.
bool Front::HasToken(const CallHead& head) const {
  if (!options_.token_digest.has_value()) return true;
  if (!head.authorization.has_value() || !head.authorization->starts_with(kBearer)) return false;
  const std::string_view token = std::string_view(*head.authorization).substr(kBearer.size());
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return CRYPTO_memcmp(digest.data(), options_.token_digest->data(), digest.size()) == 0;
}

// Before the message is read, which would take longer than to refuse it. Without inputs Python says
// which queue it joins.
StatusOr<RequestQueue::Place> Front::Admit(Clock::time_point deadline) {
  StatusOr<RequestQueue::Place> place = RequestQueue::Place();
  // The message tells the model. So a call is refused only if it would wait too long for each.
  for (const FrontModel& model : models_) {
    if (InputsOf(model) == nullptr) return RequestQueue::Place();
    place = model.queue->Admit(deadline);
    if (place.ok()) break;
  }
  // A reservation in the queue of one model could keep its requests out for those of another.
  if (place.ok() && models_.size() > 1) return RequestQueue::Place();
  return place;
}

RequestCounts& Front::CountsOf(const Infer& infer) const {
  return infer.model == nullptr ? *counts_ : *infer.model->counts;
}

CallVerdict Front::OnCall(CallId call, const CallHead& head) {
  // Python also answers who has no token, so that refusals are worded and recorded once.
  if (head.method != kModelInfer || !HasToken(head)) {
    Push({.kind = CallEvent::Kind::kCall, .call = call, .head = head});
    return {.due = head.deadline.value_or(Clock::time_point::max())};
  }
  const auto deadline =
      std::min(head.deadline.value_or(Clock::time_point::max()), head.arrived + options_.timeout);
  auto place = Admit(deadline);
  if (!place.ok()) {
    const GrpcCode code = CodeOf(place.status());
    counts_->Add(head.arrived, code);
    return {.code = code, .text = place.status().message()};
  }
  Infer& infer = infers_[call];
  infer.head = head;
  infer.deadline = deadline;
  infer.place = std::move(place).value();
  return {.due = deadline};
}

// Kept until OnEnd(): a unary call is complete only then, and one with a second message is an
// error.
void Front::OnMessage(CallId call, GrpcMessage message) {
  const auto found = infers_.find(call);
  if (found == infers_.end()) {
    return Push({.kind = CallEvent::Kind::kMessage,
                 .call = call,
                 .head = {},
                 .message = std::move(message)});
  }
  Infer& infer = found->second;
  if (infer.is_refused) return;
  if (infer.message.has_value()) {
    return Refuse(call, &infer,
                  InvalidArgument("ModelInfer takes one message, and there are several"));
  }
  infer.message = std::move(message);
}

void Front::OnEnd(CallId call) {
  const auto found = infers_.find(call);
  if (found == infers_.end()) {
    return Push({.kind = CallEvent::Kind::kEnd, .call = call, .head = {}});
  }
  Infer& infer = found->second;
  if (infer.is_refused) return;
  auto read = Read(&infer);
  if (!read.ok()) return Refuse(call, &infer, read.status());
  std::optional<InferRequest> request = std::move(read).value();
  std::shared_ptr<AnsweredRequests> log;
  if (request.has_value()) {
    const FrontModel& model = *infer.model;
    const std::string draw_id = request->id.empty() && MayBeDrawn(model) ? RandomId() : request->id;
    if (model.log != nullptr && model.log->draw().Takes(draw_id)) log = model.log;
    if (IsForPython(model, request->is_stable, draw_id)) {
      infer.head.draw_id = draw_id;
      request.reset();
    }
  }
  if (!request.has_value()) {
    HandOver(call, &infer);
    infers_.erase(found);
    return;
  }
  infer.message->held->Add(request->samples.ids.storage_bytes);
  infer.submitted =
      std::make_shared<InferCall>(*this, call, infer, *std::move(request), std::move(log));
  infer.message.reset();
  infer.place = {};
  if (const Status status = infer.model->queue->Submit(infer.submitted); !status.ok()) {
    infer.submitted->Fail(CodeOf(status), status.message());
  }
}

Status Front::CheckTensors(std::span<const std::byte> message) const {
  const auto no_inputs = [](std::string_view) -> const ModelInputs* { return nullptr; };
  return ReadInferRequest(message, no_inputs, max_tensors_).status();
}

// None: Python is to take it. Finds its model.
StatusOr<std::optional<InferRequest>> Front::Read(Infer* infer) {
  if (!infer->message.has_value() || infer->message->is_compressed) {
    return std::optional<InferRequest>();
  }
  std::shared_ptr<const ModelInputs> inputs;
  const auto inputs_of = [&](std::string_view name) -> const ModelInputs* {
    const auto found = std::find_if(models_.begin(), models_.end(),
                                    [&](const FrontModel& model) { return model.name == name; });
    if (found == models_.end()) return nullptr;
    infer->model = &*found;
    inputs = InputsOf(*found);
    return inputs.get();
  };
  return ReadInferRequest(infer->message->bytes, inputs_of, max_tensors_);
}

// Python's reader takes it or explains what is wrong.
void Front::HandOver(CallId call, Infer* infer) {
  Push({.kind = CallEvent::Kind::kCall, .call = call, .head = std::move(infer->head)});
  if (infer->message.has_value()) {
    Push({.kind = CallEvent::Kind::kMessage,
          .call = call,
          .head = {},
          .message = *std::move(infer->message)});
  }
  Push({.kind = CallEvent::Kind::kEnd, .call = call, .head = {}});
}

void Front::Refuse(CallId call, Infer* infer, const Status& status) {
  infer->is_refused = true;
  CountsOf(*infer).Add(infer->head.arrived, CodeOf(status));
  server_.Finish(call, CodeOf(status), status.message());
}

void Front::OnLate(CallId call) {
  const auto found = infers_.find(call);
  if (found == infers_.end()) return;
  Infer& infer = found->second;
  if (infer.submitted == nullptr) {
    return Refuse(call, &infer,
                  DeadlineExceeded("the request's deadline passed before its message arrived"));
  }
  infer.submitted->GiveUp();
  infer.submitted->Fail(GrpcCode::kDeadlineExceeded,
                        "the request's deadline passed before its answer: the server is behind");
}

void Front::OnRefused(CallId call, GrpcCode code) {
  const auto found = infers_.find(call);
  if (found == infers_.end() || std::exchange(found->second.is_refused, true)) return;
  CountsOf(found->second).Add(found->second.head.arrived, code);
}

void Front::OnClosed(CallId call) {
  const auto found = infers_.find(call);
  if (found == infers_.end()) {
    return PushClosed(call);
  }
  // Without effect on one that has its answer.
  if (const auto& submitted = found->second.submitted; submitted != nullptr) {
    submitted->GiveUp();
    submitted->End(GrpcCode::kCancelled);
  } else if (!found->second.is_refused) {
    CountsOf(found->second).Add(found->second.head.arrived, GrpcCode::kCancelled);
  }
  infers_.erase(found);
}

}  // namespace persia::serving

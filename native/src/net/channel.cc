#include "net/channel.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "net/asio.h"
#include "net/client_connection.h"

namespace persia::net {
namespace {

constexpr std::chrono::milliseconds kFirstBackoff{20};
constexpr std::chrono::milliseconds kMaxBackoff{500};

using Done = std::function<void(StatusOr<Buffer>)>;

// Rounded up and at least 1: a request that is sent has time left.
uint32_t MillisecondsUntil(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(left, 1, UINT32_MAX));
}

std::string ToText(const Buffer& body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

}  // namespace

// Everything below the public methods runs on the channel's own thread and needs no lock; the
// public methods post to it.
//
// A thread for each channel, rather than one for the process: large replies of different peers are
// received in parallel, a slow callback holds up one peer only, and nothing global has to be torn
// down when the process exits. The thread owns the Impl, so that a channel may even be destroyed by
// one of its own callbacks.
class Channel::Impl : public std::enable_shared_from_this<Impl>, public ClientConnection::Listener {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)),
        random_(static_cast<uint32_t>(Clock::now().time_since_epoch().count())) {}

  void Start() {
    thread_ = std::thread([self = shared_from_this()] { self->io_.run(); });
  }
  void Close();
  void Shutdown();
  void SetAddress(const std::string& address);
  void CallAsync(Method method, Parts parts, Clock::time_point deadline, Done done);
  bool OnOwnThread() const { return std::this_thread::get_id() == thread_.get_id(); }
  const std::string& peer() const { return options_.peer; }

 private:
  enum class State {
    kWaiting,     // for a connection, or for its turn on it
    kWriting,     // its parts are being read by the socket
    kSent,        // for its reply
    kBackingOff,  // the peer answered kUnavailable
  };
  struct PendingCall {
    PendingCall(asio::io_context& io, Method m, Parts p, Clock::time_point d, Done f)
        : method(m),
          parts(std::move(p)),
          deadline(d),
          done(std::move(f)),
          deadline_timer(io),
          retry_timer(io) {}

    const Method method;
    const Parts parts;
    const Clock::time_point deadline;
    Done done;
    State state = State::kWaiting;
    uint32_t num_refusals = 0;
    std::string refusal;                                        // the peer's last kUnavailable
    std::optional<std::pair<FrameHeader, Buffer>> early_reply;  // came while kWriting
    asio::steady_timer deadline_timer;
    asio::steady_timer retry_timer;
  };
  // By request id. Ids grow, so the order of a map is that of the calls.
  using Calls = std::map<uint64_t, std::unique_ptr<PendingCall>>;

  void OnConnected() override;
  void OnWritten() override;
  void OnReply(const FrameHeader& header, Buffer body) override;
  void OnBroken(const std::string& reason) override;

  void Submit(std::unique_ptr<PendingCall> call);
  void Pump();
  void WriteCall(uint64_t id, PendingCall& call);
  void ChangeAddress(const std::string& address);
  void CloseConnection();
  void RetryLater(uint64_t id, PendingCall& call);
  void MakeWaiting(uint64_t id, PendingCall& call);
  void OnDeadline(uint64_t id);
  Status DeadlineStatus(const PendingCall& call) const;
  void Complete(uint64_t id, StatusOr<Buffer> result);
  std::chrono::milliseconds Backoff(uint32_t attempt);
  std::string Name() const { return address_.empty() ? peer() : peer() + " at " + address_; }

  const Options options_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  asio::steady_timer reconnect_timer_{io_};
  std::minstd_rand random_;
  std::thread thread_;

  std::string address_;
  std::shared_ptr<ClientConnection> connection_;
  bool connected_ = false;     // connection_ is open, not just opening
  bool backing_off_ = false;   // reconnect_timer_ runs
  uint32_t num_failures_ = 0;  // of connections, since the last reply
  std::string last_failure_;

  Calls calls_;
  std::set<uint64_t> waiting_;       // ids of the calls that are kWaiting
  std::optional<uint64_t> writing_;  // the connection is busy with this call
  uint64_t next_id_ = 1;
  bool closed_ = false;
};

// ---- from any thread

void Channel::Impl::Close() {
  asio::post(io_, [this] {
    closed_ = true;
    CloseConnection();
    reconnect_timer_.cancel();
    while (!calls_.empty()) {
      Complete(calls_.begin()->first, Unavailable(Name() + ": the channel was closed"));
    }
  });
}

void Channel::Impl::Shutdown() {
  Close();
  asio::post(io_, [this] { work_.reset(); });
  if (OnOwnThread()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Channel::Impl::SetAddress(const std::string& address) {
  asio::post(io_, [this, address] { ChangeAddress(address); });
}

void Channel::Impl::CallAsync(Method method, Parts parts, Clock::time_point deadline, Done done) {
  asio::post(io_, [this, call = std::make_unique<PendingCall>(
                             io_, method, std::move(parts), deadline, std::move(done))]() mutable {
    Submit(std::move(call));
  });
}

// ---- calls

void Channel::Impl::Submit(std::unique_ptr<PendingCall> call) {
  const uint64_t id = next_id_++;
  PendingCall& pending = *(calls_[id] = std::move(call));
  if (closed_) return Complete(id, Unavailable(Name() + ": the channel was closed"));
  if (pending.parts.size_bytes() > options_.max_body_bytes) {
    return Complete(
        id,
        InvalidArgument(Name() + ": a request of " + std::to_string(pending.parts.size_bytes()) +
                        " bytes is above the limit of " + std::to_string(options_.max_body_bytes) +
                        "; send smaller batches"));
  }
  if (pending.deadline <= Clock::now()) return Complete(id, DeadlineStatus(pending));
  pending.deadline_timer.expires_at(pending.deadline);
  pending.deadline_timer.async_wait([this, id](ErrorCode cancelled) {
    if (!cancelled) OnDeadline(id);
  });
  MakeWaiting(id, pending);
  Pump();
}

void Channel::Impl::MakeWaiting(uint64_t id, PendingCall& call) {
  call.state = State::kWaiting;
  waiting_.insert(id);
}

// Does what can be done next for those who wait: send one, or connect.
void Channel::Impl::Pump() {
  if (waiting_.empty() || closed_) return;
  if (connected_) {
    if (!writing_) WriteCall(*waiting_.begin(), *calls_[*waiting_.begin()]);
    return;
  }
  if (connection_ != nullptr || backing_off_ || address_.empty()) return;
  connection_ = std::make_shared<ClientConnection>(io_, this, options_.max_body_bytes);
  connection_->Connect(address_);
}

void Channel::Impl::WriteCall(uint64_t id, PendingCall& call) {
  waiting_.erase(id);
  call.state = State::kWriting;
  writing_ = id;
  FrameHeader header;
  header.method = static_cast<uint8_t>(call.method);
  header.request_id = id;
  header.deadline_ms = MillisecondsUntil(call.deadline);
  header.body_bytes = call.parts.size_bytes();
  connection_->Write(header, call.parts);
}

void Channel::Impl::Complete(uint64_t id, StatusOr<Buffer> result) {
  auto node = calls_.extract(id);
  waiting_.erase(id);
  // Destroyed with `node`: timers (cancelled) and what the parts own.
  node.mapped()->done(std::move(result));
}

void Channel::Impl::OnDeadline(uint64_t id) {
  const auto found = calls_.find(id);
  // The timer may have fired while the completion that cancels it was already on its way.
  if (found == calls_.end()) return;
  const Status status = DeadlineStatus(*found->second);
  // Half a frame is out, and its bytes belong to the caller, who takes them back now: the stream
  // cannot go on. The other calls are repeated on a new connection.
  if (found->second->state == State::kWriting) CloseConnection();
  Complete(id, status);
  Pump();
}

// Reachable but silent is kDeadlineExceeded; not reachable, or refusing, is kUnavailable with the
// last reason. What the peer said before it fell silent is told: it knows more than we do.
Status Channel::Impl::DeadlineStatus(const PendingCall& call) const {
  if (!call.refusal.empty()) return Unavailable(Name() + ": " + call.refusal);
  if (connected_) {
    return DeadlineExceeded(Name() + ": no answer to " + std::string(MethodName(call.method)) +
                            " within its deadline");
  }
  if (address_.empty()) return Unavailable(Name() + ": its address is not known yet");
  return Unavailable(Name() + ": " +
                     (last_failure_.empty() ? "not connected by the deadline" : last_failure_));
}

// ---- the connection

void Channel::Impl::ChangeAddress(const std::string& address) {
  if (closed_) return;
  // The same address again is news too when the peer was thought to be away: it is back.
  if (address != address_) CloseConnection();
  address_ = address;
  num_failures_ = 0;
  reconnect_timer_.cancel();
  backing_off_ = false;
  for (auto& [id, call] : calls_) {
    if (call->state != State::kBackingOff) continue;
    call->retry_timer.cancel();
    MakeWaiting(id, *call);
  }
  Pump();
}

void Channel::Impl::CloseConnection() {
  if (connection_ == nullptr) return;
  connection_->Close();
  connection_.reset();
  connected_ = false;
  writing_.reset();
  for (auto& [id, call] : calls_) {
    if (call->state != State::kWriting && call->state != State::kSent) continue;
    call->early_reply.reset();
    MakeWaiting(id, *call);
  }
}

void Channel::Impl::OnConnected() {
  connected_ = true;
  Pump();
}

void Channel::Impl::OnWritten() {
  const uint64_t id = *writing_;
  writing_.reset();
  // It is there: a call being written never completes without its connection closing.
  PendingCall& call = *calls_[id];
  call.state = State::kSent;
  if (call.early_reply.has_value()) {
    auto [header, body] = std::move(*call.early_reply);
    call.early_reply.reset();
    OnReply(header, std::move(body));
  }
  Pump();
}

void Channel::Impl::OnBroken(const std::string& reason) {
  CloseConnection();
  last_failure_ = reason;
  backing_off_ = true;
  reconnect_timer_.expires_after(Backoff(num_failures_++));
  reconnect_timer_.async_wait([this](ErrorCode cancelled) {
    if (cancelled) return;
    backing_off_ = false;
    Pump();
  });
}

void Channel::Impl::OnReply(const FrameHeader& header, Buffer body) {
  num_failures_ = 0;
  last_failure_.clear();
  const auto found = calls_.find(header.request_id);
  if (found == calls_.end()) return;  // its deadline came first
  PendingCall& call = *found->second;
  if (call.state == State::kWriting) {
    // The socket may still read the parts, which belong
    // to the caller again once the call completes.
    call.early_reply.emplace(header, std::move(body));
    return;
  }
  if (call.state != State::kSent) return;  // a second answer
  const auto code = static_cast<StatusCode>(header.status);
  if (code == StatusCode::kOk) return Complete(header.request_id, std::move(body));
  if (code == StatusCode::kUnavailable) {
    call.refusal = ToText(body);
    return RetryLater(header.request_id, call);
  }
  if (code > StatusCode::kFailedPrecondition) {
    return Complete(header.request_id,
                    Internal(Name() + ": unknown status " + std::to_string(header.status) + ": " +
                             ToText(body)));
  }
  Complete(header.request_id, Status(code, Name() + ": " + ToText(body)));
}

void Channel::Impl::RetryLater(uint64_t id, PendingCall& call) {
  call.state = State::kBackingOff;
  call.retry_timer.expires_after(Backoff(call.num_refusals++));
  call.retry_timer.async_wait([this, id](ErrorCode cancelled) {
    const auto found = calls_.find(id);
    if (cancelled || found == calls_.end() || found->second->state != State::kBackingOff) return;
    MakeWaiting(id, *found->second);
    Pump();
  });
}

// Doubles up to the limit; half of it is chance, so that
// callers of a restarted peer do not come all at once.
std::chrono::milliseconds Channel::Impl::Backoff(uint32_t attempt) {
  const auto full = std::min(kMaxBackoff, kFirstBackoff * (1 << std::min(attempt, 10u)));
  std::uniform_int_distribution<int64_t> jitter(full.count() / 2, full.count());
  return std::chrono::milliseconds(jitter(random_));
}

// ---- Channel

Channel::Channel(Options options) : impl_(std::make_shared<Impl>(std::move(options))) {
  impl_->Start();
}

Channel::~Channel() { impl_->Shutdown(); }

void Channel::SetAddress(const std::string& address) { impl_->SetAddress(address); }

void Channel::Close() { impl_->Close(); }

void Channel::CallAsync(Method method, Parts parts, Clock::time_point deadline, Done done) {
  impl_->CallAsync(method, std::move(parts), deadline, std::move(done));
}

StatusOr<Buffer> Channel::Call(Method method, const Parts& parts, Clock::time_point deadline) {
  if (impl_->OnOwnThread()) {
    return Internal(impl_->peer() + ": Call() from a callback of its own channel waits for itself");
  }
  std::mutex mutex;
  std::condition_variable answered;
  std::optional<StatusOr<Buffer>> answer;
  impl_->CallAsync(method, parts, deadline, [&](StatusOr<Buffer> result) {
    std::lock_guard lock(mutex);
    answer.emplace(std::move(result));
    answered.notify_one();  // under the lock: the condition variable ends with this frame
  });
  // The channel's own deadline timer ends this wait.
  std::unique_lock lock(mutex);
  answered.wait(lock, [&] { return answer.has_value(); });
  return std::move(*answer);
}

}  // namespace persia::net

#include "net/channel.h"

#include <algorithm>

namespace persia::net {
namespace {

constexpr std::chrono::milliseconds kFirstBackoff{20};
constexpr std::chrono::milliseconds kMaxBackoff{500};
// After so long without a call the channel's own thread watches the connection.
constexpr std::chrono::milliseconds kIdleTime{50};

// Rounded up and at least 1: a request that is sent has time left.
uint32_t MillisecondsUntil(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(left, 1, UINT32_MAX));
}

std::string ToText(const Buffer& body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

}  // namespace

// ---- from any thread

Channel::Channel(Options options)
    : peer_(std::move(options.peer)),
      max_body_bytes_(options.max_body_bytes),
      security_(std::move(options.security)),
      random_(static_cast<uint32_t>(Clock::now().time_since_epoch().count())) {
  thread_ = std::thread([this] { RunThread(); });
}

// The leader runs it; when there is none, the channel's thread becomes it.
template <typename Function>
void Channel::Post(Function function) {
  const Lock lock(lead_mutex_);
  ++num_posted_;
  asio::post(io_, [this, function = std::move(function)]() mutable {
    {
      const Lock running(lead_mutex_);
      --num_posted_;
    }
    function();
  });
  if (!led_) thread_wakes_.notify_one();
}

// Posted like everything else: the leader alone touches calls_.
void Channel::Close() {
  Post([this] {
    closed_ = true;
    CloseConnection();
    reconnect_timer_.cancel();
    while (!calls_.empty()) {
      Complete(calls_.begin()->first, Unavailable(Name(), ": the channel was closed"));
    }
  });
}

Channel::~Channel() {
  Close();
  Post([this] { quit_ = true; });
  thread_.join();
}

void Channel::SetAddress(const std::string& address) {
  Post([this, address] { ChangeAddress(address); });
}

void Channel::CallAsync(const MethodId& method, Segments segments, Clock::time_point deadline,
                        Done done) {
  PendingCallPtr call(
      new PendingCall{method, std::move(segments), deadline, /*async=*/true, std::move(done)});
  Post([this, call = std::move(call)]() mutable { SubmitAsync(std::move(call)); });
}

// The caller takes the lead if it is free. Else its call is posted, and it waits for its answer or
// for the lead, which a leader that is answered passes on.
StatusOr<Buffer> Channel::Call(const MethodId& method, const Segments& segments,
                               Clock::time_point deadline) {
  if (OnOwnThread()) {
    return Internal(peer_, ": Call() from a callback of its own channel waits for itself");
  }
  BlockedCaller caller;
  const auto done = [this, &caller](StatusOr<Buffer> result) {
    const Lock lock(lead_mutex_);
    caller.answer.emplace(std::move(result));
    caller.wakes.notify_one();  // under the lock: the condition variable ends with the call
  };
  PendingCallPtr call(new PendingCall{method, segments, deadline, /*async=*/false, done});
  Lock lock(lead_mutex_);
  blocked_.push_back(&caller);
  bool leads = TakeLead();
  lock.unlock();
  if (leads) {
    Submit(std::move(call));
  } else {
    asio::post(io_, [this, call = std::move(call)]() mutable { Submit(std::move(call)); });
  }
  lock.lock();
  while (leads || !caller.answer.has_value()) {
    if (leads) {
      lock.unlock();
      LeadUntilAnswered(caller);
      lock.lock();
      led_ = false;
    }
    // Before each wait: who led may have left since, and would have woken nobody.
    leads = !caller.answer.has_value() && deferred_.empty() && TakeLead();
    if (leads || caller.answer.has_value()) continue;
    if (!led_) WakeNextLeader();
    // The deadline timer, which every leader minds, ends this wait.
    caller.wakes.wait(lock);
  }
  std::erase(blocked_, &caller);
  if (!led_) WakeNextLeader();
  return std::move(*caller.answer);
}

// ---- leading

// With lead_mutex_ held, like WakeNextLeader().
bool Channel::TakeLead() {
  if (led_) return false;
  ++num_leads_;
  return led_ = true;
}

void Channel::WakeNextLeader() {
  if (deferred_.empty() && !blocked_.empty()) {
    blocked_.front()->wakes.notify_one();
  } else if (ThreadWanted()) {
    thread_wakes_.notify_one();
  }
}

// Or until the channel's own thread is needed.
void Channel::LeadUntilAnswered(const BlockedCaller& caller) {
  while (!caller.answer.has_value() && deferred_.empty()) io_.run_one();
}

void Channel::RunThread() {
  uint64_t seen_leads = 0;
  bool quit = false;
  Lock lock(lead_mutex_);
  while (!quit) {
    thread_wakes_.wait_for(lock, kIdleTime, [this] { return !led_ && ThreadWanted(); });
    const bool idle = std::exchange(seen_leads, num_leads_) == num_leads_;
    if ((!ThreadWanted() && !idle) || !TakeLead()) continue;
    do {
      std::vector<PendingCallPtr> deferred = std::exchange(deferred_, {});
      lock.unlock();
      for (PendingCallPtr& call : deferred) Submit(std::move(call));
      LeadOnOwnThread();
      quit = quit_;
      lock.lock();
    } while (ThreadWanted());  // also at the end: every call ends with its callback
    led_ = false;
    WakeNextLeader();
  }
}

// Until all calls that are left are of blocked callers.
void Channel::LeadOnOwnThread() {
  io_.poll();
  while (!quit_ && (calls_.empty() || num_async_ > 0)) io_.run_one();
}

// ---- calls

void Channel::SubmitAsync(PendingCallPtr call) {
  if (OnOwnThread()) return Submit(std::move(call));
  const Lock lock(lead_mutex_);
  deferred_.push_back(std::move(call));
}

void Channel::Submit(PendingCallPtr call) {
  const uint64_t id = next_id_++;
  PendingCall& pending = *(calls_[id] = std::move(call));
  num_calls_.Add();
  if (pending.async) ++num_async_;
  if (closed_) return Complete(id, Unavailable(Name(), ": the channel was closed"));
  const uint64_t size_bytes = pending.segments.size_bytes();
  if (size_bytes > max_body_bytes_) {
    return Complete(
        id, InvalidArgument(Name(), ": a request of ", size_bytes, " bytes is above the limit of ",
                            max_body_bytes_, "; send smaller batches"));
  }
  if (pending.deadline <= Clock::now()) return Complete(id, DeadlineStatus(pending));
  WatchDeadline(pending.deadline);
  MakeWaiting(id, pending);
  Pump();
}

// Every call that is kWaiting is in waiting_, and no other: Pump() sends them in the order of ids.
void Channel::MakeWaiting(uint64_t id, PendingCall& call) {
  call.state = State::kWaiting;
  waiting_.insert(id);
}

// Does what can be done next for those who wait: send them, or connect.
void Channel::Pump() {
  if (waiting_.empty() || closed_) return;
  if (connected_) {
    while (!writing_ && !waiting_.empty()) WriteNext();
    return;
  }
  if (connection_ != nullptr || backing_off_ || address_.empty()) return;
  Listener* listener = this;  // the base is private, and make_shared not a friend
  connection_ = std::make_shared<ClientConnection>(io_, listener, max_body_bytes_, security_);
  connection_->Connect(address_);
}

void Channel::WriteNext() {
  const uint64_t id = *waiting_.begin();
  waiting_.erase(waiting_.begin());
  PendingCall& call = *calls_[id];
  FrameHeader header;
  header.method = call.method.number;
  header.request_id = id;
  header.deadline_ms = MillisecondsUntil(call.deadline);
  header.batch = call.batch;
  num_sent_bytes_.Add(call.segments.size_bytes());
  if (call.num_writes++ > 0) num_retries_.Add();
  if (connection_->Write(header, call.segments)) {
    call.state = State::kSent;
  } else {
    call.state = State::kWriting;
    writing_ = id;
  }
}

void Channel::Complete(uint64_t id, StatusOr<Buffer> result) {
  const auto node = calls_.extract(id);
  waiting_.erase(id);
  if (node.mapped()->async) --num_async_;
  num_completed_.fetch_add(1, std::memory_order_relaxed);
  call_times_.Record(node.mapped()->begin, Clock::now(), /*reference=*/0,
                     TracedBatch::IdOf(node.mapped()->batch));
  // Destroyed with `node`: a timer (cancelled) and what the segments own.
  node.mapped()->done(std::move(result));
}

// One timer for all calls, set to the earliest deadline that it has been told of. It is left alone
// when that call completes: most calls then cost no timer at all.
void Channel::WatchDeadline(Clock::time_point deadline) {
  if (deadline >= deadline_timer_at_) return;
  deadline_timer_at_ = deadline;
  deadline_timer_.expires_at(deadline);
  deadline_timer_.async_wait([this](ErrorCode cancelled) {
    if (!cancelled) OnDeadlineTimer();
  });
}

void Channel::OnDeadlineTimer() {
  const auto now = Clock::now();
  auto next = Clock::time_point::max();
  std::vector<std::pair<uint64_t, Status>> ended;
  for (const auto& [id, call] : calls_) {
    if (call->deadline <= now) {
      ended.emplace_back(id, DeadlineStatus(*call));
    } else {
      next = std::min(next, call->deadline);
    }
  }
  deadline_timer_at_ = Clock::time_point::max();
  if (next != Clock::time_point::max()) WatchDeadline(next);
  for (auto& [id, status] : ended) {
    // Half a frame is out, and its bytes belong to the caller, who takes them back now: the stream
    // cannot continue. The other calls are repeated on a new connection.
    if (calls_[id]->state == State::kWriting) CloseConnection();
    Complete(id, std::move(status));
  }
  Pump();
}

// Reachable but silent is kDeadlineExceeded; not reachable, or refusing, is kUnavailable with the
// last reason. What the peer said, or why its connection broke, before it fell silent is told: that
// explains more than the silence.
Status Channel::DeadlineStatus(const PendingCall& call) const {
  if (!call.refusal.empty()) return Unavailable(Name(), ": ", call.refusal);
  if (connected_ && last_failure_.empty()) {
    return DeadlineExceeded(Name(), ": no answer to ", call.method.name, " within its deadline");
  }
  if (address_.empty()) return Unavailable(Name(), ": its address is not known yet");
  return Unavailable(Name(), ": ",
                     last_failure_.empty() ? "not connected by the deadline" : last_failure_);
}

// ---- the connection

void Channel::ChangeAddress(const std::string& address) {
  if (closed_) return;
  // The same address again is news too when the peer was thought to be away: it is back.
  if (address != address_) CloseConnection();
  address_ = address;
  num_failures_ = 0;
  reconnect_timer_.cancel();
  backing_off_ = false;
  for (auto& [id, call] : calls_) {
    if (call->state != State::kBackingOff) continue;
    call->retry_timer.reset();
    MakeWaiting(id, *call);
  }
  Pump();
}

void Channel::CloseConnection() {
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

void Channel::OnConnected() {
  connected_ = true;
  num_connects_.Add();
  Pump();
}

// A reply may have come before the last byte of its request was written: peers answer errors early.
void Channel::OnWritten() {
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

// The calls are repeated on the next connection, after a pause that grows while connecting fails: a
// peer that is away costs no busy loop.
void Channel::OnBroken(const std::string& reason) {
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

// The next attempt is made after a pause, like that of a connection that has broken: callers that
// try again at once must not make a busy loop of refusals.
void Channel::OnRefused(const std::string& reason) {
  OnBroken(reason);
  std::vector<uint64_t> refused;
  for (const auto& [id, call] : calls_) refused.push_back(id);
  for (const uint64_t id : refused) Complete(id, PermissionDenied(Name(), ": ", reason));
}

void Channel::OnReply(const FrameHeader& header, Buffer body) {
  num_failures_ = 0;
  last_failure_.clear();
  num_received_bytes_.Add(body.size());
  const auto found = calls_.find(header.request_id);
  if (found == calls_.end()) return;  // its deadline came first
  PendingCall& call = *found->second;
  if (call.state == State::kWriting) {
    // The socket may still read the segments, which belong
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
  if (code > StatusCode::kPermissionDenied) {
    return Complete(header.request_id,
                    Internal(Name(), ": unknown status ", header.status, ": ", ToText(body)));
  }
  Complete(header.request_id, Status(code, Name() + ": " + ToText(body)));
}

// kUnavailable of the peer itself ("still loading"): the connection is good, the call waits alone.
void Channel::RetryLater(uint64_t id, PendingCall& call) {
  call.state = State::kBackingOff;
  call.retry_timer.emplace(io_, Backoff(call.num_refusals++));
  call.retry_timer->async_wait([this, id](ErrorCode cancelled) {
    const auto found = calls_.find(id);
    if (cancelled || found == calls_.end() || found->second->state != State::kBackingOff) return;
    MakeWaiting(id, *found->second);
    Pump();
  });
}

// Doubles up to the limit; half of it is chance, so that
// callers of a restarted peer do not come all at once.
std::chrono::milliseconds Channel::Backoff(uint32_t attempt) {
  const auto full = std::min(kMaxBackoff, kFirstBackoff * (1 << std::min(attempt, 10u)));
  std::uniform_int_distribution<int64_t> jitter(full.count() / 2, full.count());
  return std::chrono::milliseconds(jitter(random_));
}

ChannelStats Channel::stats() const {
  const uint64_t num_completed = num_completed_.load();  // first: never more than the calls
  ChannelStats stats{.name = peer_, .metrics = {}, .calls = call_times_.snapshot()};
  counters_.AddTo(&stats.metrics);
  stats.metrics.AddGauge("num_pending", "persia_rpc_pending_calls", "Calls under way.",
                         stats.metrics["num_calls"] - num_completed);
  return stats;
}

}  // namespace persia::net

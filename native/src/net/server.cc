#include "net/server.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/trace_buffer.h"
#include "net/asio.h"
#include "net/audit.h"
#include "net/listener.h"

namespace persia::net {
namespace {

// While the process is out of descriptors, accepting fails at once, again and again.
constexpr std::chrono::milliseconds kAcceptRetry{50};

// Of connections that have proved nothing, in all. One host may have half of them.
constexpr uint32_t kMaxUnproven = 128;

}  // namespace

Server::Server(Options options) : state_(std::move(options)) {
  state_.run = [this](Request request) { Run(std::move(request)); };
  state_.on_closed = [this](uint64_t tag) { OnClosed(tag); };
  state_.on_refused = [this] { num_refused_.Add(); };
  state_.on_proven = [this](uint64_t tag) {
    const std::lock_guard lock(mutex_);
    unproven_.Remove(tag);
  };
}

void Server::Handle(const MethodId& method, Handler handler) {
  state_.handlers[method.number] = std::move(handler);
  state_.methods[method.number] = method;
  durations_[method.number] = std::make_unique<DurationStats>("handle " + std::string(method.name));
}

Server::~Server() {
  Stop(std::chrono::seconds(10));
  // Stop() returns at its timeout, but a handler that
  // still runs uses what the owner destroys next.
  for (std::thread& thread : threads_) thread.join();
  state_.budget.DropWaiters();
}

// ---- threads

StatusOr<uint16_t> Server::Start(const std::string& host, uint16_t port) {
  std::lock_guard lifecycle(lifecycle_mutex_);
  if (started_ || stopped_) {
    return FailedPrecondition("the server was started already; a server can be started once");
  }
  const Options& options = state_.options;
  if (options.num_io_threads == 0 || options.num_handler_threads == 0) {
    return InvalidArgument("num_io_threads and num_handler_threads must be at least 1");
  }
  max_connections_ = options.max_connections > 0 ? options.max_connections : ConnectionsPermitted();
  PERSIA_RETURN_IF_ERROR(state_.poller.Open());
  auto bound = Listen(host, port);
  if (!bound.ok()) return bound;
  started_ = true;
  for (uint32_t i = 0; i < options.num_io_threads + options.num_handler_threads; ++i) {
    threads_.emplace_back([this] { HandleEvents(); });
  }
  return bound;
}

// Until Stop() makes every Wait() return its tag.
void Server::HandleEvents() {
  while (true) {
    const Poller::Event event = state_.poller.Wait();
    if (event.tag == Poller::kStopTag) return;
    OnEvent(event);
  }
}

void Server::OnEvent(const Poller::Event& event) {
  if (event.tag == Poller::kTimerTag) return OnTimer();
  if (event.tag == kListenerTag) return Accept();
  // Owned here while its event is handled: it may be closed, and leave the map, meanwhile.
  std::shared_ptr<Connection> connection;
  {
    std::lock_guard lock(mutex_);
    const auto found = connections_.find(event.tag);
    if (found == connections_.end()) return;  // closed meanwhile
    connection = found->second;
  }
  connection->OnReady(event.events);
}

// ---- connections

StatusOr<uint16_t> Server::Listen(const std::string& host, uint16_t port) {
  PERSIA_ASSIGN_OR_RETURN(Listener listener, net::Listen(host, port));
  listener_ = std::move(listener.socket);
  state_.poller.Add(listener_.get(), kListenerTag, EPOLLIN);
  return listener.port;
}

void Server::Accept() {
  while (true) {
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    Tcp::endpoint peer;
    socklen_t peer_bytes = static_cast<socklen_t>(peer.capacity());
    UniqueFd socket(
        ::accept4(listener_.get(), peer.data(), &peer_bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
    const int error = socket.get() < 0 ? errno : 0;
    if (error == EAGAIN || (IsOutOfDescriptors(error) && !HasWaiting(listener_.get()))) {
      return state_.poller.Arm(listener_.get(), kListenerTag, EPOLLIN);
    }
    lock.unlock();
    if (error == EINTR || error == ECONNABORTED) continue;
    if (error != 0) {
      if (OnAcceptFailed(error)) continue;
      return;
    }
    AddConnection(std::move(socket), peer.address().to_string(), peer.port());
  }
}

// Where the process is out of descriptors, strangers give theirs back, one for each client that
// waits: the line in front of a client of the job may be long.
bool Server::OnAcceptFailed(int error) {
  WarnOperator("cannot accept a connection: " + std::system_category().message(error) +
               "; raise the limit of open files (ulimit -n)");
  std::shared_ptr<Connection> stranger;  // most often its last owner
  {
    const std::lock_guard lock(mutex_);
    const auto tag = IsOutOfDescriptors(error) ? unproven_.FirstToClose() : std::nullopt;
    if (tag.has_value()) {
      stranger = connections_.at(*tag);
    } else {
      accept_at_ = Clock::now() + kAcceptRetry;
      state_.poller.WakeAt(accept_at_);
    }
  }
  if (stranger == nullptr) return false;
  stranger->CloseNow();
  num_crowded_out_.Add();
  return true;
}

void Server::AddConnection(UniqueFd socket, const std::string& host, uint16_t port) {
  std::shared_ptr<Connection> connection;
  std::shared_ptr<Connection> crowded_out;
  {
    std::lock_guard lock(mutex_);
    const uint64_t tag = next_tag_++;
    crowded_out = UnprovenToClose(host);
    const bool is_full = connections_.size() >= max_connections_ && crowded_out == nullptr;
    if (is_full) {
      num_crowded_out_.Add();
      WarnOperator("a connection from " + host + " is closed: " + std::to_string(max_connections_) +
                   " are open; raise the limit of open files (ulimit -n)");
    }
    // The tag enters the map before the connection is armed: its first event finds it.
    if (!is_full && !stopping_ && state_.poller.Add(socket.get(), tag, 0)) {
      connection = std::make_shared<Connection>(std::move(socket), tag,
                                                host + ":" + std::to_string(port), state_);
      connections_[tag] = connection;
      if (state_.options.security.identity != nullptr) unproven_.Add(tag, host);
    }
  }
  // Outside mutex_: a connection that closes takes it.
  if (crowded_out != nullptr) {
    crowded_out->CloseNow();
    num_crowded_out_.Add();  // what is counted has ended: a reader of both gauges sees no more open
  }
  if (connection != nullptr) connection->Start();
}

std::shared_ptr<Connection> Server::UnprovenToClose(const std::string& host) const {
  const size_t most = std::min(kMaxUnproven, std::max(max_connections_ / 2, 2u));
  std::optional<uint64_t> tag;
  if (unproven_.CountOf(host) >= most / 2) {
    tag = unproven_.OldestOf(host);
  } else if (unproven_.size() >= most || connections_.size() >= max_connections_) {
    tag = unproven_.FirstToClose();
  }
  return tag.has_value() ? connections_.at(*tag) : nullptr;
}

// Something is due: connections whose time is up, or accepting again.
void Server::OnTimer() {
  const auto now = Clock::now();
  auto next = Clock::time_point::max();
  for (const auto& [tag, connection] : OpenConnections()) {
    next = std::min(next, connection->CloseIfDue(now));
  }
  {
    std::lock_guard lock(mutex_);
    if (!stopping_ && accept_at_ <= now) {
      accept_at_ = Clock::time_point::max();
      state_.poller.Arm(listener_.get(), kListenerTag, EPOLLIN);
    }
    next = std::min(next, accept_at_);
  }
  if (next != Clock::time_point::max()) state_.poller.WakeAt(next);
}

// Stop() waits until no connection is left.
void Server::OnClosed(uint64_t tag) {
  std::lock_guard lock(mutex_);
  unproven_.Remove(tag);
  connections_.erase(tag);  // not its last owner: who closes it is another
  if (connections_.empty()) connection_closed_.notify_all();
}

Server::Connections Server::OpenConnections() {
  std::lock_guard lock(mutex_);
  return connections_;
}

// ---- handlers

// On the thread that has read the request. Goes on with those in line, so that no thread has to be
// woken for them.
void Server::Run(Request request) {
  std::unique_lock lock(run_mutex_);
  if (run_no_more_) return;
  if (num_running_ == state_.options.num_handler_threads) {
    request.in_line_since = Clock::now();
    in_line_.push_back(std::move(request));
    return;
  }
  ++num_running_;
  while (true) {
    lock.unlock();
    StatusOr<Segments> reply = RunHandler(request);
    Count(request, reply);
    if (state_.methods[request.header.method].audited) Audit(request, reply);
    request.connection->Reply(request.header, std::move(reply));
    request = Request();  // its bytes are given back before the next one's turn
    lock.lock();
    if (run_no_more_ || in_line_.empty()) break;
    request = std::move(in_line_.front());
    in_line_.pop_front();
    queue_times_.Record(request.in_line_since, Clock::now(), 0,
                        TracedBatch::IdOf(request.header.batch));
  }
  --num_running_;
}

StatusOr<Segments> Server::RunHandler(const Request& request) {
  if (Clock::now() >= request.deadline) {
    num_late_.Add();
    return DeadlineExceeded("the deadline passed before the request's turn came");
  }
  // Our handlers do not throw, but what they use may (an
  // allocation, say); one request must not end the process.
  const TracedBatch batch(request.header.batch);
  const Timed timed(*durations_[request.header.method]);
  try {
    return state_.handlers[request.header.method](request.body,
                                                  {request.deadline, request.connection->role()});
  } catch (const std::exception& e) {
    return Internal("method ", request.header.method, ": ", e.what());
  }
}

// Bytes of bodies, as both ends count them: a test compares them with the channel's.
void Server::Count(const Request& request, const StatusOr<Segments>& reply) {
  num_requests_.Add();
  num_received_bytes_.Add(request.body.size());
  if (reply.ok()) {
    num_sent_bytes_.Add(reply.value().size_bytes());
  } else {
    num_failed_.Add();
  }
}

void Server::Audit(const Request& request, const StatusOr<Segments>& reply) {
  RecordAuditEvent({.peer = request.connection->peer(),
                    .role = request.connection->role(),
                    .method = std::string(state_.methods[request.header.method].name),
                    .outcome = reply.ok() ? "ok" : "failed: " + reply.status().ToString()});
}

void Server::AddMetrics(Metrics* metrics) const {
  counters_.AddTo(metrics);
  {
    const std::lock_guard lock(mutex_);
    metrics->AddGauge("rpc_num_connections", "persia_rpc_connections", "Connections of clients.",
                      connections_.size());
  }
  const std::lock_guard lock(run_mutex_);
  metrics->AddGauge("rpc_num_running", "persia_rpc_running_requests", "Requests being handled.",
                    num_running_);
  metrics->AddGauge("rpc_num_in_line", "persia_rpc_waiting_requests",
                    "Requests that wait for a handler.", in_line_.size());
}

std::vector<const DurationStats*> Server::durations() const {
  std::vector<const DurationStats*> all = {&queue_times_};
  for (const auto& one : durations_) {
    if (one != nullptr) all.push_back(one.get());
  }
  return all;
}

// ---- ending

void Server::Stop(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::lock_guard lifecycle(lifecycle_mutex_);
  if (!started_ || stopped_) return;
  stopped_ = true;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;  // from here on no connection is added
    listener_ = UniqueFd();
  }
  // Outside mutex_: a connection that closes takes it.
  for (const auto& [tag, connection] : OpenConnections()) connection->Drain();
  {
    std::unique_lock lock(mutex_);
    connection_closed_.wait_until(lock, deadline, [this] { return connections_.empty(); });
  }
  for (const auto& [tag, connection] : OpenConnections()) connection->CloseNow();
  std::deque<Request> dropped;  // destroyed outside the lock: leases go back
  {
    std::lock_guard lock(run_mutex_);
    run_no_more_ = true;
    dropped.swap(in_line_);
  }
  state_.poller.Stop();
}

}  // namespace persia::net

#include "serving/grpc_server.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "net/asio.h"
#include "net/audit.h"

namespace persia::serving {
namespace {

using net::Clock;

constexpr uint64_t kWakeTag = net::Poller::kFirstFreeTag;
constexpr uint64_t kListenerTag = kWakeTag + 1;  // of the first; after the last, connections
constexpr int kMaxEvents = 64;                   // before answers have their turn
constexpr int kMaxAccepts = 64;                  // before the accepted are read
constexpr size_t kMaxUnproven = 128;             // that close others; more close each other
constexpr std::chrono::milliseconds kTick{50};   // between two looks at deadlines
constexpr uint32_t kManyRefusals = 10;           // of calls, between them

void Signal(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(fd, &one, sizeof(one));
}

void Unsignal(int fd) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t ignored = ::read(fd, &count, sizeof(count));
}

std::string NameOf(const net::Tcp::endpoint& peer) {
  const std::string address = peer.address().to_string();
  const std::string host = peer.address().is_v6() ? "[" + address + "]" : address;
  return host + ":" + std::to_string(peer.port());
}

}  // namespace

GrpcServer::GrpcServer(GrpcOptions options, CallHandler* handler)
    : shared_(std::move(options), handler) {}

GrpcServer::~GrpcServer() {
  Stop(std::chrono::milliseconds(0));
  if (thread_.joinable()) thread_.join();
}

StatusOr<uint16_t> GrpcServer::Start(const std::string& host, uint16_t port) {
  PERSIA_RETURN_IF_ERROR(poller_.Open());
  wake_ = net::UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  PERSIA_ASSIGN_OR_RETURN(listeners_, net::ListenOnAll(host, port));
  max_connections_ = std::min(shared_.options.max_connections, net::ConnectionsPermitted());
  next_tag_ = kListenerTag;
  bool waits = wake_.get() >= 0 && poller_.Add(wake_.get(), kWakeTag, EPOLLIN);
  for (const auto& listener : listeners_) {
    waits = waits && poller_.Add(listener.socket.get(), next_tag_++, EPOLLIN);
  }
  if (!waits) {
    return IOError("cannot wait for connections: ", std::system_category().message(errno));
  }
  poller_.WakeAt(Clock::now() + kTick);
  thread_ = std::thread([this] { Run(); });
  return listeners_.front().port;
}

void GrpcServer::Stop(std::chrono::milliseconds timeout) {
  if (!thread_.joinable()) return;
  std::unique_lock lock(mutex_);
  stopping_ = true;
  cut_off_at_ = std::min(cut_off_at_, Clock::now() + timeout);
  Signal(wake_.get());
  ended_.wait(lock, [&] { return has_ended_; });
}

// ---- from any thread

void GrpcServer::Send(CallId call, std::string message) {
  Post({call, true, false, GrpcCode::kOk, std::move(message)}, true);
}

void GrpcServer::Finish(CallId call, GrpcCode code, std::string text) {
  Post({call, false, true, code, std::move(text)}, true);
}

void GrpcServer::Reply(CallId call, std::string message) {
  Post({call, true, true, GrpcCode::kOk, std::move(message)}, false);
}

void GrpcServer::Post(Action action, bool wakes) {
  if (std::this_thread::get_id() == own_id_.load()) return Apply(std::move(action));
  {
    const std::lock_guard lock(mutex_);
    actions_.push_back(std::move(action));
  }
  if (wakes) Wake();
}

void GrpcServer::Wake() {
  if (std::this_thread::get_id() == own_id_.load()) return;  // it looks before it waits
  {
    const std::lock_guard lock(mutex_);
    if (actions_.empty() || std::exchange(is_woken_, true)) return;
  }
  Signal(wake_.get());
}

// ---- the thread

void GrpcServer::Run() {
  own_id_ = std::this_thread::get_id();
  ::pthread_setname_np(::pthread_self(), "persia-front");
  while (true) {
    OnEvent(poller_.Wait());
    bool is_done = false;
    for (int i = 1; i < kMaxEvents && !is_done; ++i) {
      const auto event = poller_.Poll();
      is_done = !event.has_value();
      if (!is_done) OnEvent(*event);
    }
    TakeActions();
    FlushTouched();
    if (is_done) RestAfterRefusals();
    const std::lock_guard lock(mutex_);
    if (is_draining_ && (connections_.empty() || Clock::now() >= cut_off_at_)) break;
  }
  connections_.clear();  // closes their calls
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  ended_.notify_all();
}

// Each wake-up interrupts what computes on the same processor. Where requests are refused there are
// many, and it costs less to refuse several at once. Called once no connection has more to read: a
// rest for each of them would be longer than answering it.
void GrpcServer::RestAfterRefusals() {
  constexpr std::chrono::microseconds kRest{500};
  if (std::exchange(shared_.num_refused, 0) > 0) std::this_thread::sleep_for(kRest);
}

void GrpcServer::OnEvent(const net::Poller::Event& event) {
  if (event.tag == net::Poller::kTimerTag) return OnTimer();
  if (event.tag == kWakeTag) {
    Unsignal(wake_.get());
    poller_.Arm(wake_.get(), kWakeTag, EPOLLIN);
    return BeginDrain();
  }
  const size_t listener = event.tag - kListenerTag;
  if (listener < listeners_.size()) return Accept(listener);
  const auto found = connections_.find(event.tag);
  if (found == connections_.end()) return;
  touched_.insert(event.tag);
  // A client that does not read is not read: what answers it would have no bound.
  if (!found->second->is_blocked() && !found->second->Read()) Remove(event.tag);
}

void GrpcServer::BeginDrain() {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ || is_draining_) return;
  }
  is_draining_ = true;
  for (auto& listener : listeners_) listener.socket = net::UniqueFd();
  for (const auto& [tag, connection] : connections_) {
    connection->Drain();
    touched_.insert(tag);
  }
}

void GrpcServer::ArmListeners() {
  for (size_t i = 0; i < listeners_.size(); ++i) {
    poller_.Arm(listeners_[i].socket.get(), kListenerTag + i, EPOLLIN);
  }
}

void GrpcServer::Accept(size_t listener) {
  const int fd = listeners_[listener].socket.get();
  if (is_draining_) return;
  for (int i = 0; i < kMaxAccepts; ++i) {
    net::Tcp::endpoint peer;
    auto size = static_cast<socklen_t>(peer.capacity());
    net::UniqueFd socket(::accept4(fd, peer.data(), &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.get() < 0) {
      if (OnAcceptFailed(listener, errno)) continue;
      return;
    }
    if (connections_.size() >= max_connections_) {
      const bool is_of_files = max_connections_ < shared_.options.max_connections;
      net::WarnOperator("the port of predictions has " + std::to_string(connections_.size()) +
                        " connections and takes no more: those without calls are closed; let "
                        "clients share connections, " +
                        (is_of_files ? "raise the limit of open files (ulimit -n), " : "") +
                        "or run more servers");
      if (!CloseIdle()) continue;
    }
    net::ConfigureSocket(socket.get());
    const uint64_t tag = next_tag_++;
    if (!poller_.Add(socket.get(), tag, EPOLLIN)) continue;
    connections_[tag] =
        std::make_unique<GrpcConnection>(std::move(socket), tag, NameOf(peer), &shared_);
    touched_.insert(tag);
  }
  poller_.Arm(fd, kListenerTag + listener, EPOLLIN);
}

// Whether to accept again at once. Where the process is out of descriptors, connections without
// calls give theirs back, one for each client that waits.
bool GrpcServer::OnAcceptFailed(size_t listener, int error) {
  if (error == EINTR || error == ECONNABORTED) return true;
  const int fd = listeners_[listener].socket.get();
  const bool is_out = net::IsOutOfDescriptors(error);
  if (error == EAGAIN || (is_out && !net::HasWaiting(fd))) {
    poller_.Arm(fd, kListenerTag + listener, EPOLLIN);
    return false;
  }
  net::WarnOperator("cannot accept a connection: " + std::system_category().message(error) +
                    "; raise the limit of open files (ulimit -n)");
  if (is_out && CloseIdle()) return true;
  accept_at_ = Clock::now() + kTick;
  return false;
}

// Makes room for a new connection. False: each one has calls. Those that have begun no call yet may
// be strangers', or of clients that connect at the same time: they have a share, within which they
// close connections that were not used for long.
bool GrpcServer::CloseIdle() {
  const size_t share = std::clamp(connections_.size() / 2, size_t{1}, kMaxUnproven);
  size_t num_unproven = 0;
  GrpcConnection* unproven = nullptr;  // the oldest one
  GrpcConnection* unused = nullptr;    // the one that was used longest ago
  for (const auto& [tag, connection] : connections_) {
    if (!connection->is_idle()) continue;
    if (!connection->has_begun()) ++num_unproven;
    GrpcConnection*& first = connection->has_begun() ? unused : unproven;
    if (first == nullptr || connection->used_at() < first->used_at()) first = connection.get();
  }
  GrpcConnection* closed = num_unproven >= share || unused == nullptr ? unproven : unused;
  if (closed == nullptr) return false;
  closed->Drain();
  closed->Flush();
  Remove(closed->tag());
  return true;
}

void GrpcServer::TakeActions() {
  std::vector<Action> actions;
  {
    const std::lock_guard lock(mutex_);
    actions.swap(actions_);
    is_woken_ = false;
  }
  for (Action& action : actions) Apply(std::move(action));
}

void GrpcServer::Apply(Action action) {
  const auto found = shared_.calls.find(action.call);
  if (found == shared_.calls.end()) return;
  const auto [connection, stream] = found->second;
  touched_.insert(connection->tag());
  std::string text;
  if (action.has_message) {
    connection->Send(stream, std::move(action.bytes));
  } else {
    text = std::move(action.bytes);
  }
  // Refused once its message had arrived, which a narrow window would have delayed.
  if (action.code == GrpcCode::kResourceExhausted) ++shared_.num_turned_away;
  if (action.has_end) connection->Finish(stream, action.code, std::move(text));
}

void GrpcServer::FlushTouched() {
  for (const uint64_t tag : std::exchange(touched_, {})) {
    const auto found = connections_.find(tag);
    if (found == connections_.end()) continue;
    GrpcConnection& connection = *found->second;
    if (!connection.Flush()) {
      Remove(tag);
      continue;
    }
    // The socket does not tell of what TLS has read ahead; that it can be written to, it tells at
    // once.
    const uint32_t reads = EPOLLIN | (connection.HasPending() ? EPOLLOUT : 0u);
    poller_.Arm(connection.fd(), tag, connection.is_blocked() ? EPOLLOUT : reads);
  }
}

void GrpcServer::Remove(uint64_t tag) { connections_.erase(tag); }

void GrpcServer::OnTimer() {
  const auto now = Clock::now();
  if (std::exchange(shared_.num_turned_away, 0) >= kManyRefusals) {
    overloaded_until_ = now + shared_.options.overload;
  }
  shared_.is_overloaded = now < overloaded_until_;
  std::vector<uint64_t> ended;
  for (const auto& [tag, connection] : connections_) {
    if (!connection->CheckTimes(now)) ended.push_back(tag);
    // It may have been read.
    if (connection->wants_write() || connection->HasPending()) touched_.insert(tag);
  }
  for (const uint64_t tag : ended) Remove(tag);
  if (now >= accept_at_ && !is_draining_) {
    accept_at_ = Clock::time_point::max();
    ArmListeners();
  }
  poller_.WakeAt(now + kTick);
}

}  // namespace persia::serving

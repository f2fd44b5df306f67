// Channel and Server of this folder, in place of those of src/net/.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>

#include "net/channel.h"
#include "net/server.h"

namespace persia::net {
namespace {

using simulation::Connection;
using simulation::ConnectionPtr;
using simulation::Time;
using simulation::Wire;
using simulation::World;

// As in src/net/channel.cc.
constexpr Time kFirstBackoff = 20'000'000;
constexpr Time kMaxBackoff = 500'000'000;

Time TimeOf(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::vector<std::byte> Gather(const Segments& segments) {
  std::vector<std::byte> bytes;
  for (const auto& view : segments.views) bytes.insert(bytes.end(), view.begin(), view.end());
  return bytes;
}

Buffer ToBuffer(std::span<const std::byte> bytes) {
  Buffer buffer(bytes.size());
  if (!bytes.empty()) std::memcpy(buffer.data(), bytes.data(), bytes.size());
  return buffer;
}

std::string ToText(const Buffer& body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

}  // namespace

Channel::Channel(Options options)
    : peer_(std::move(options.peer)), process_(World::Get().current_process()) {}

Channel::~Channel() {
  Close();
  *lives_ = false;
}

std::function<void()> Channel::Mine(std::function<void()> event) {
  return [lives = lives_, event = std::move(event)] {
    if (*lives) event();
  };
}

void Channel::Close() {
  closed_ = true;
  Disconnect();
  while (!calls_.empty()) {
    Complete(calls_.begin()->first, Unavailable(peer_, ": the channel was closed"));
  }
}

void Channel::SetAddress(const std::string& address) {
  if (closed_) return;
  if (address != address_) {
    Disconnect();
    ++attempt_;
    connecting_ = false;
  }
  address_ = address;
  num_failures_ = 0;
  backing_off_ = false;
  for (auto& [id, call] : calls_) {
    if (call.state == State::kBackingOff) call.state = State::kWaiting;
  }
  Pump();
}

StatusOr<Buffer> Channel::Call(const MethodId& method, const Segments& segments,
                               Clock::time_point deadline) {
  std::mutex mutex;
  std::condition_variable answered;
  std::optional<StatusOr<Buffer>> answer;
  Submit(method, segments, deadline, [&](StatusOr<Buffer> result) {
    const std::lock_guard lock(mutex);
    answer.emplace(std::move(result));
    answered.notify_one();
  });
  std::unique_lock lock(mutex);
  answered.wait(lock, [&] { return answer.has_value(); });
  return std::move(*answer);
}

void Channel::CallAsync(const MethodId& method, Segments segments, Clock::time_point deadline,
                        Done done) {
  Submit(method, segments, deadline, std::move(done));
}

void Channel::Submit(const MethodId& method, const Segments& segments, Clock::time_point deadline,
                     Done done) {
  const uint64_t id = next_id_++;
  World& world = World::Get();
  // The longest time there is must not wrap around.
  const Time until = std::min(TimeOf(deadline), world.now() + Time{1} * 86'400'000'000'000);
  PendingCall& call =
      calls_
          .emplace(id,
                   PendingCall{.method = method,
                               .body = std::make_shared<std::vector<std::byte>>(Gather(segments)),
                               .deadline = until,
                               .done = std::move(done)})
          .first->second;
  if (closed_) return Complete(id, Unavailable(peer_, ": the channel was closed"));
  if (until <= world.now()) return Complete(id, DeadlineStatus(call));
  world.AtProcess(process_, until, Mine([this, id] {
                    const auto found = calls_.find(id);
                    if (found != calls_.end()) Complete(id, DeadlineStatus(found->second));
                  }));
  Pump();
}

void Channel::Pump() {
  if (closed_) return;
  const bool is_wanted = std::any_of(calls_.begin(), calls_.end(), [](const auto& entry) {
    return entry.second.state == State::kWaiting;
  });
  if (!is_wanted) return;
  if (connection_ != nullptr) {
    for (auto& [id, call] : calls_) {
      if (call.state == State::kWaiting) Send(id, call);
    }
    return;
  }
  if (connecting_ || backing_off_ || address_.empty()) return;
  connecting_ = true;
  const uint64_t attempt = ++attempt_;
  Wire::Get().Connect(
      process_, address_,
      [this, lives = lives_, attempt](ConnectionPtr connection, const std::string& refusal) {
        if (!*lives || attempt != attempt_ || closed_) {
          if (connection != nullptr) Wire::Get().Break(connection, 0);
          return;
        }
        connecting_ = false;
        if (connection == nullptr || !connection->is_open) {
          return OnBroken(connection == nullptr ? refusal : "connection reset");
        }
        connection_ = connection;
        connection->ends[0].on_broken = Mine([this, connection] {
          if (connection_ == connection) OnBroken("connection reset");
        });
        Pump();
      });
}

void Channel::Send(uint64_t id, PendingCall& call) {
  call.state = State::kSent;
  const ConnectionPtr connection = connection_;
  const Time left = std::max<Time>(1, call.deadline - World::Get().now());
  const auto arrive = [this, lives = lives_, id, connection, left, method = call.method.number,
                       body = call.body] {
    const auto reply = [this, lives, id, connection](StatusCode code, Buffer answer) {
      const auto bytes = std::make_shared<Buffer>(std::move(answer));
      Wire::Get().Send(connection, 1, [this, lives, id, connection, code, bytes] {
        if (*lives && connection_ == connection) OnReply(id, code, ToBuffer(bytes->span()));
      });
    };
    connection->server->OnRequest(
        {method, ToBuffer(*body), World::Get().now() + left, std::move(reply)});
  };
  Wire::Get().Send(connection, 0, arrive);
}

void Channel::OnReply(uint64_t id, StatusCode code, Buffer body) {
  num_failures_ = 0;
  last_failure_.clear();
  const auto found = calls_.find(id);
  if (found == calls_.end() || found->second.state != State::kSent) return;
  if (code == StatusCode::kOk) return Complete(id, std::move(body));
  if (code != StatusCode::kUnavailable) {
    return Complete(id, Status(code, peer_ + ": " + ToText(body)));
  }
  PendingCall& call = found->second;
  call.refusal = ToText(body);
  call.state = State::kBackingOff;
  World& world = World::Get();
  world.AtProcess(process_, world.now() + Backoff(call.num_refusals++), Mine([this, id] {
                    const auto again = calls_.find(id);
                    if (again == calls_.end() || again->second.state != State::kBackingOff) return;
                    again->second.state = State::kWaiting;
                    Pump();
                  }));
}

void Channel::OnBroken(const std::string& reason) {
  Disconnect();
  last_failure_ = reason;
  backing_off_ = true;
  World& world = World::Get();
  world.AtProcess(process_, world.now() + Backoff(num_failures_++), Mine([this] {
                    backing_off_ = false;
                    Pump();
                  }));
}

void Channel::Disconnect() {
  if (connection_ != nullptr) Wire::Get().Break(std::exchange(connection_, nullptr), 0);
  for (auto& [id, call] : calls_) {
    if (call.state == State::kSent) call.state = State::kWaiting;
  }
}

// On a fiber, as the channel's own thread: `done` may lock what others hold.
void Channel::Complete(uint64_t id, StatusOr<Buffer> result) {
  auto node = calls_.extract(id);
  const auto ended = std::make_shared<std::pair<Done, StatusOr<Buffer>>>(
      std::move(node.mapped().done), std::move(result));
  World::Get().Spawn(process_, [ended] {
    ended->first(std::move(ended->second));
    ended->first = nullptr;
  });
}

Status Channel::DeadlineStatus(const PendingCall& call) const {
  if (!call.refusal.empty()) return Unavailable(peer_, ": ", call.refusal);
  if (connection_ != nullptr && last_failure_.empty()) {
    return DeadlineExceeded(peer_, ": no answer to ", call.method.name, " within its deadline");
  }
  return Unavailable(peer_, ": ",
                     last_failure_.empty() ? "not connected by the deadline" : last_failure_);
}

Time Channel::Backoff(uint32_t attempt) {
  const Time full = std::min(kMaxBackoff, kFirstBackoff * (Time{1} << std::min(attempt, 10u)));
  return World::Get().Between(full / 2, full);
}

StatusOr<uint16_t> Server::Start(const std::string& host, uint16_t port) {
  Wire& wire = Wire::Get();
  if (port == 0) port = wire.next_port++;
  address_ = host + ":" + std::to_string(port);
  if (!wire.listeners.emplace(address_, Wire::Listener{this, process_}).second) {
    return IOError(address_, ": address already in use");
  }
  return port;
}

// The connections break with their process, or when their client finds no listener any more: a
// request that still arrives is not answered.
void Server::Stop(std::chrono::milliseconds) {
  Wire::Get().OnStopped(this);
  while (num_running_ > 0) World::Get().Wait(this);
}

void Server::OnRequest(Request request) {
  in_line_.push_back(std::move(request));
  if (num_running_ >= options_.num_handler_threads) return;
  ++num_running_;
  World::Get().Spawn(process_, [this] { RunHandlers(); });
}

void Server::RunHandlers() {
  while (!in_line_.empty()) {
    const Request request = std::move(in_line_.front());
    in_line_.pop_front();
    auto reply = RunHandler(request);
    if (reply.ok()) Wire::Get().NoteAnswer(process_, request.method);
    const std::string text(reply.ok() ? "" : reply.status().message());
    request.reply(reply.code(), reply.ok()
                                    ? ToBuffer(Gather(reply.value()))
                                    : ToBuffer(std::as_bytes(std::span(text.data(), text.size()))));
  }
  if (--num_running_ == 0) World::Get().Wake(this);
}

StatusOr<Segments> Server::RunHandler(const Request& request) {
  if (request.deadline <= World::Get().now()) {
    return DeadlineExceeded("its deadline passed before a handler was free");
  }
  const auto handler = handlers_.find(request.method);
  if (handler == handlers_.end()) return InvalidArgument("no handler");
  try {
    const auto deadline = Clock::time_point(std::chrono::nanoseconds(request.deadline));
    return handler->second(request.body, CallContext{deadline});
  } catch (const std::exception& error) {
    return Internal(error.what());
  }
}

}  // namespace persia::net

#include "net/server.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "net/asio.h"
#include "net/connection.h"

namespace persia::net {
namespace {

// While the process is out of descriptors, accepting fails at once, again and again.
constexpr std::chrono::milliseconds kAcceptRetry{50};

Status CannotListen(const Server::Options& options, const std::string& reason) {
  return IOError("cannot listen on " + options.host + ":" + std::to_string(options.port) + ": " +
                 reason);
}

StatusOr<Tcp::endpoint> ResolveListenAddress(asio::io_context& io, const Server::Options& options) {
  ErrorCode error;
  const auto literal = asio::ip::make_address(options.host, error);
  if (!error) return Tcp::endpoint(literal, options.port);
  Tcp::resolver resolver(io);
  const auto results =
      resolver.resolve(options.host, std::to_string(options.port), Tcp::resolver::passive, error);
  if (error) return CannotListen(options, error.message());
  return results.begin()->endpoint();
}

}  // namespace

// Order of members is order of life: operations still
// queued in io_ own connections, which use state_.
class Server::Impl {
 public:
  explicit Impl(Options options) : state_(std::move(options)) {
    state_.on_closed = [this](Connection* connection) { OnClosed(connection); };
  }
  ~Impl();

  void Handle(Method method, Handler handler) {
    state_.handlers[static_cast<uint8_t>(method)] = std::move(handler);
  }
  StatusOr<uint16_t> Start();
  void Stop(std::chrono::milliseconds timeout);

 private:
  Status Listen();
  void Accept();
  void OnAccept(ErrorCode error, Tcp::socket socket);
  void OnClosed(Connection* connection);
  std::vector<std::shared_ptr<Connection>> OpenConnections();

  ServerState state_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  // Their handlers run on this strand.
  Tcp::acceptor acceptor_{asio::make_strand(io_)};
  asio::steady_timer accept_timer_{acceptor_.get_executor()};
  std::vector<std::thread> io_threads_;

  std::mutex lifecycle_mutex_;  // serialises Start and Stop
  bool started_ = false;
  bool stopped_ = false;

  std::mutex mutex_;  // guards what follows
  std::condition_variable connection_closed_;
  std::unordered_map<Connection*, std::shared_ptr<Connection>> connections_;
  bool stopping_ = false;
};

Server::Impl::~Impl() {
  Stop(std::chrono::seconds(10));
  // Stop() returns at its timeout, but a handler that still runs uses what the owner destroys next,
  // and requests whose turn never came own connections, whose sockets need io_.
  state_.pool.reset();
  state_.budget.DropWaiters();
}

StatusOr<uint16_t> Server::Impl::Start() {
  std::lock_guard lifecycle(lifecycle_mutex_);
  if (started_ || stopped_) return FailedPrecondition("a server can be started once");
  const Options& options = state_.options;
  if (options.num_io_threads == 0 || options.num_handler_threads == 0) {
    return InvalidArgument("num_io_threads and num_handler_threads must be at least 1");
  }
  PERSIA_RETURN_IF_ERROR(Listen());
  started_ = true;
  state_.pool = std::make_unique<asio::thread_pool>(options.num_handler_threads);
  const uint16_t port = acceptor_.local_endpoint().port();
  Accept();
  for (uint32_t i = 0; i < options.num_io_threads; ++i) {
    io_threads_.emplace_back([this] { io_.run(); });
  }
  return port;
}

Status Server::Impl::Listen() {
  auto endpoint = ResolveListenAddress(io_, state_.options);
  if (!endpoint.ok()) return endpoint.status();
  ErrorCode error;
  acceptor_.open(endpoint->protocol(), error);
  // A restarted server takes its port over from connections that are still timing out.
  if (!error) acceptor_.set_option(Tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(*endpoint, error);
  if (!error) acceptor_.listen(Tcp::acceptor::max_listen_connections, error);
  if (!error) return Status::Ok();
  ErrorCode ignored;
  acceptor_.close(ignored);
  return CannotListen(state_.options, error.message());
}

void Server::Impl::Accept() {
  acceptor_.async_accept(asio::make_strand(io_), [this](ErrorCode error, Tcp::socket socket) {
    OnAccept(error, std::move(socket));
  });
}

void Server::Impl::OnAccept(ErrorCode error, Tcp::socket socket) {
  if (!acceptor_.is_open()) return;
  if (error) {
    accept_timer_.expires_after(kAcceptRetry);
    return accept_timer_.async_wait([this](ErrorCode cancelled) {
      if (!cancelled && acceptor_.is_open()) Accept();
    });
  }
  auto connection = std::make_shared<Connection>(std::move(socket), state_);
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    connections_[connection.get()] = connection;
  }
  connection->Start();
  Accept();
}

void Server::Impl::OnClosed(Connection* connection) {
  std::lock_guard lock(mutex_);
  connections_.erase(connection);
  if (connections_.empty()) connection_closed_.notify_all();
}

std::vector<std::shared_ptr<Connection>> Server::Impl::OpenConnections() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Connection>> open;
  for (const auto& [_, connection] : connections_) open.push_back(connection);
  return open;
}

void Server::Impl::Stop(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::lock_guard lifecycle(lifecycle_mutex_);
  if (!started_ || stopped_) return;
  stopped_ = true;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;  // from here on no connection is added
  }
  asio::post(acceptor_.get_executor(), [this] {
    ErrorCode ignored;
    acceptor_.close(ignored);
    accept_timer_.cancel();
  });
  for (const auto& connection : OpenConnections()) connection->Drain();
  {
    std::unique_lock lock(mutex_);
    connection_closed_.wait_until(lock, deadline, [this] { return connections_.empty(); });
  }
  work_.reset();
  io_.stop();
  for (std::thread& thread : io_threads_) thread.join();
  // Nothing runs on any strand now.
  ErrorCode ignored;
  acceptor_.close(ignored);
  for (const auto& connection : OpenConnections()) connection->CloseNow();
}

Server::Server(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Server::~Server() = default;
void Server::Handle(Method method, Handler handler) { impl_->Handle(method, std::move(handler)); }
StatusOr<uint16_t> Server::Start() { return impl_->Start(); }
void Server::Stop(std::chrono::milliseconds timeout) { impl_->Stop(timeout); }

}  // namespace persia::net

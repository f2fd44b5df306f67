#include "net/listener.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "net/asio.h"

namespace persia::net {
namespace {

Status CannotListen(const std::string& host, uint16_t port, const ErrorCode& error) {
  const bool is_taken = error == asio::error::address_in_use;
  return IOError("cannot listen on ", host, ":", port, ": ", error.message(), "; ",
                 is_taken ? "stop what uses the port, or take" : "take",
                 " another --port or --host");
}

// Blocks on the resolver of the system: servers begin once, and have nothing to serve yet.
// Duplicates are left out, as a hosts file may list an address twice, and the second bind would
// fail.
StatusOr<std::vector<Tcp::endpoint>> Resolve(const std::string& host, uint16_t port) {
  asio::io_context io;
  ErrorCode error;
  Tcp::resolver resolver(io);
  const auto results = resolver.resolve(host, std::to_string(port), Tcp::resolver::passive, error);
  if (error) return CannotListen(host, port, error);
  std::vector<Tcp::endpoint> endpoints;
  for (const auto& result : results) {
    const Tcp::endpoint endpoint = result.endpoint();
    if (std::find(endpoints.begin(), endpoints.end(), endpoint) == endpoints.end()) {
      endpoints.push_back(endpoint);
    }
  }
  return endpoints;
}

// asio opens the socket, for its portable options, and gives it up: from here on the descriptor
// belongs to a Poller.
ErrorCode ListenOn(const Tcp::endpoint& endpoint, Listener* listener) {
  asio::io_context io;
  Tcp::acceptor acceptor(io);
  ErrorCode error;
  acceptor.open(endpoint.protocol(), error);
  if (!error) AvoidPacing(acceptor.native_handle());  // its connections inherit that
  // A restarted server takes its port over from connections that are still timing out.
  if (!error) acceptor.set_option(Tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(Tcp::acceptor::max_listen_connections, error);
  if (!error) acceptor.native_non_blocking(true, error);
  if (error) return error;
  listener->port = acceptor.local_endpoint().port();
  listener->socket = UniqueFd(acceptor.release());
  return error;
}

}  // namespace

StatusOr<Listener> Listen(const std::string& host, uint16_t port) {
  PERSIA_ASSIGN_OR_RETURN(const auto endpoints, Resolve(host, port));
  Listener listener;
  if (const auto error = ListenOn(endpoints.front(), &listener)) {
    return CannotListen(host, port, error);
  }
  return listener;
}

StatusOr<std::vector<Listener>> ListenOnAll(const std::string& host, uint16_t port) {
  PERSIA_ASSIGN_OR_RETURN(const auto endpoints, Resolve(host, port));
  std::vector<Listener> listeners;
  ErrorCode failure;
  for (Tcp::endpoint endpoint : endpoints) {
    // With port 0 the first address chooses; the others must have the same one, as clients know one
    // port.
    if (!listeners.empty()) endpoint.port(listeners.front().port);
    Listener listener;
    const auto error = ListenOn(endpoint, &listener);
    // The machine may have no IPv6, or no address of it.
    if (error == asio::error::address_family_not_supported ||
        error == ErrorCode(EADDRNOTAVAIL, asio::system_category())) {
      failure = error;
    } else if (error) {
      return CannotListen(host, port, error);
    } else {
      listeners.push_back(std::move(listener));
    }
  }
  if (listeners.empty()) return CannotListen(host, port, failure);
  return listeners;
}

// Half of a small limit, all but 512 of a large one, and never fewer than 8: a server that can
// accept none would look dead.
uint32_t ConnectionsPermitted() {
  constexpr rlim_t kReserve = 512;
  constexpr rlim_t kMost = 16384;
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMost;
  const rlim_t descriptors = limit.rlim_cur;
  return static_cast<uint32_t>(
      std::clamp(descriptors - std::min(descriptors / 2, kReserve), rlim_t{8}, kMost));
}

bool IsOutOfDescriptors(int error) { return error == EMFILE || error == ENFILE; }

bool HasWaiting(int listener) {
  pollfd waiting{listener, POLLIN, 0};
  return ::poll(&waiting, 1, 0) != 0;
}

}  // namespace persia::net

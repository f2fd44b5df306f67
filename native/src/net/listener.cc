#include "net/listener.h"

#include "net/asio.h"

namespace persia::net {
namespace {

Status CannotListen(const std::string& host, uint16_t port, const ErrorCode& error) {
  const bool is_taken = error == asio::error::address_in_use;
  return IOError("cannot listen on ", host, ":", port, ": ", error.message(), "; ",
                 is_taken ? "stop what uses the port, or take" : "take",
                 " another --port or --host");
}

StatusOr<Tcp::endpoint> ResolveListenAddress(asio::io_context& io, const std::string& host,
                                             uint16_t port) {
  ErrorCode error;
  Tcp::resolver resolver(io);
  const auto results = resolver.resolve(host, std::to_string(port), Tcp::resolver::passive, error);
  if (error) return CannotListen(host, port, error);
  return results.begin()->endpoint();
}

}  // namespace

StatusOr<Listener> Listen(const std::string& host, uint16_t port) {
  asio::io_context io;
  PERSIA_ASSIGN_OR_RETURN(const auto endpoint, ResolveListenAddress(io, host, port));
  Tcp::acceptor acceptor(io);
  ErrorCode error;
  acceptor.open(endpoint.protocol(), error);
  if (!error) AvoidPacing(acceptor.native_handle());  // its connections inherit that
  // A restarted server takes its port over from connections that are still timing out.
  if (!error) acceptor.set_option(Tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(Tcp::acceptor::max_listen_connections, error);
  if (!error) acceptor.native_non_blocking(true, error);
  if (error) return CannotListen(host, port, error);
  const uint16_t bound = acceptor.local_endpoint().port();
  return Listener{UniqueFd(acceptor.release()), bound};
}

}  // namespace persia::net

#include "net/asio.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string_view>

namespace persia::net {
namespace {

// Whether the other end is on this host, by IPv4.
bool IsLoopback(int fd) {
  sockaddr_in peer = {};
  socklen_t size = sizeof(peer);
  constexpr uint32_t kLoopbackNet = 127;
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 &&
         peer.sin_family == AF_INET && ntohl(peer.sin_addr.s_addr) >> 24 == kLoopbackNet;
}

}  // namespace

void ConfigureSocket(int fd) {
  constexpr int kKeepAliveIdleSeconds = 10;
  constexpr int kKeepAliveIntervalSeconds = 5;
  constexpr int kKeepAliveProbes = 4;
  constexpr int kUnacknowledgedMs = 30'000;
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMs);
  // Within a host there is no congestion, but the control that the system prefers may pace what is
  // sent by timers (BBR does), which costs more than the copies. Every kernel has Reno.
  constexpr std::string_view kReno = "reno";
  if (IsLoopback(fd)) ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kReno.data(), kReno.size());
}

}  // namespace persia::net

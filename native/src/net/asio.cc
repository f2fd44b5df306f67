#include "net/asio.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>

#include "net/poller.h"

namespace persia::net {
namespace {

// As many bytes as the kernel takes for a name.
using ControlName = std::array<char, 16>;

// Every kernel has it.
constexpr ControlName kReno = {"reno"};

void SetControl(int fd, const ControlName& name) {
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size());
}

// The congestion control that the system prefers: that of a new socket.
ControlName SystemControl() {
  ControlName name = kReno;
  socklen_t size = name.size();
  const UniqueFd fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ::getsockopt(fresh.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size);
  return name;
}

bool PeerIsLoopback(int fd) {
  Tcp::endpoint peer;
  auto size = static_cast<socklen_t>(peer.capacity());
  return ::getpeername(fd, peer.data(), &size) == 0 && peer.address().is_loopback();
}

}  // namespace

void AvoidPacing(int fd) { SetControl(fd, kReno); }

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
  static const ControlName system_control = SystemControl();
  SetControl(fd, PeerIsLoopback(fd) ? kReno : system_control);
}

}  // namespace persia::net

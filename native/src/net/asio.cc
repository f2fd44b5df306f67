#include "net/asio.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <optional>

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

void SetTcp(int fd, int option, int value) {
  ::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof(value));
}

// The congestion control that the system prefers: that of a new socket. None if there can be no
// new socket.
std::optional<ControlName> SystemControl() {
  ControlName name = {};
  socklen_t size = name.size();
  const UniqueFd fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::getsockopt(fresh.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return {};
  return name;
}

bool PeerIsLoopback(int fd) {
  Tcp::endpoint peer;
  auto size = static_cast<socklen_t>(peer.capacity());
  return ::getpeername(fd, peer.data(), &size) == 0 && IsLoopback(peer.address());
}

}  // namespace

bool IsLoopback(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address.is_loopback();
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).is_loopback();
}

void AvoidPacing(int fd) { SetControl(fd, kReno); }

// Without TCP_USER_TIMEOUT, which would also break the connection to a peer that is too busy to
// read.
void DetectCuts(int fd) {
  SetTcp(fd, TCP_KEEPIDLE, 2);
  SetTcp(fd, TCP_KEEPINTVL, 1);
  SetTcp(fd, TCP_KEEPCNT, 3);
  SetTcp(fd, TCP_USER_TIMEOUT, 0);
}

Unacknowledged UnacknowledgedBy(int fd) {
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  // Where the peer has no room, the kernel asks for it by probes, and a living host acknowledges
  // them.
  return {info.tcpi_unacked > 0 || info.tcpi_probes > 0,
          std::chrono::milliseconds(info.tcpi_last_ack_recv)};
}

void ConfigureSocket(int fd) {
  constexpr int kKeepAliveIdleSeconds = 10;
  constexpr int kKeepAliveIntervalSeconds = 5;
  constexpr int kKeepAliveProbes = 4;
  constexpr int kUnacknowledgedMs = 30'000;
  constexpr int kOn = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof(kOn));
  SetTcp(fd, TCP_NODELAY, kOn);
  SetTcp(fd, TCP_KEEPIDLE, kKeepAliveIdleSeconds);
  SetTcp(fd, TCP_KEEPINTVL, kKeepAliveIntervalSeconds);
  SetTcp(fd, TCP_KEEPCNT, kKeepAliveProbes);
  SetTcp(fd, TCP_USER_TIMEOUT, kUnacknowledgedMs);
  const std::optional<ControlName> control = PeerIsLoopback(fd) ? kReno : SystemControl();
  if (control.has_value()) SetControl(fd, *control);
}

}  // namespace persia::net

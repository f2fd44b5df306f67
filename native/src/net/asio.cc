#include "net/asio.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

namespace persia::net {

void ConfigureSocket(Tcp::socket& socket) {
  constexpr int kKeepAliveIdleSeconds = 10;
  constexpr int kKeepAliveIntervalSeconds = 5;
  constexpr int kKeepAliveProbes = 4;
  constexpr int kUnacknowledgedMs = 30'000;
  const auto set = [fd = socket.native_handle()](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMs);
}

std::vector<asio::const_buffer> GatherFrame(std::span<const std::byte, kHeaderBytes> header,
                                            const Parts& parts) {
  std::vector<asio::const_buffer> buffers;
  buffers.reserve(parts.views.size() + 1);
  buffers.emplace_back(header.data(), header.size());
  for (const auto& view : parts.views) {
    if (!view.empty()) buffers.emplace_back(view.data(), view.size());
  }
  return buffers;
}

}  // namespace persia::net

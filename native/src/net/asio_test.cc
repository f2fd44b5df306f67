// The congestion control of sockets within a host is chosen before they connect.
#include "net/asio.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "net/channel.h"
#include "net/poller.h"
#include "net/test_support.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

std::string ControlOf(int fd) {
  char name[16] = {};
  socklen_t size = sizeof(name);
  EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  return name;
}

int StateOf(int fd) {
  tcp_info info = {};
  socklen_t size = sizeof(info);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? info.tcpi_state : -1;
}

uint16_t PortOf(int fd) {
  Tcp::endpoint own;
  auto size = static_cast<socklen_t>(own.capacity());
  EXPECT_EQ(::getsockname(fd, own.data(), &size), 0);
  return own.port();
}

// The first descriptor of this process that is wanted; -1 if there is none.
int FindDescriptor(const std::function<bool(int)>& wanted) {
  constexpr int kMost = 4096;
  for (int fd = 0; fd < kMost; ++fd) {
    if (wanted(fd)) return fd;
  }
  return -1;
}

TEST(PacingTest, AServerChoosesBeforeItListens) {
  Server server({});
  const uint16_t port = server.Start().value();
  const int listener =
      FindDescriptor([&](int fd) { return StateOf(fd) == TCP_LISTEN && PortOf(fd) == port; });
  ASSERT_GE(listener, 0);
  EXPECT_EQ(ControlOf(listener), "reno");
}

TEST(PacingTest, AddressesOfThisHostAreKnownInEachForm) {
  for (const char* text : {"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(IsLoopback(asio::ip::make_address(text))) << text;
  for (const char* text : {"10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1"})
    EXPECT_FALSE(IsLoopback(asio::ip::make_address(text))) << text;
}

TEST(PacingTest, AcceptedConnectionsInheritIt) {
  asio::io_context io;
  Tcp::acceptor acceptor(io, Tcp::v4());
  AvoidPacing(acceptor.native_handle());
  acceptor.bind({asio::ip::address_v4::loopback(), 0});
  acceptor.listen();
  Tcp::socket client(io);
  client.connect(acceptor.local_endpoint());
  Tcp::socket accepted = acceptor.accept();
  EXPECT_EQ(ControlOf(accepted.native_handle()), "reno");
  ConfigureSocket(accepted.native_handle());
  EXPECT_EQ(ControlOf(accepted.native_handle()), "reno");
}

// Whether the socket connects in a time that is long even where the kernel is busy.
bool Connects(int fd) {
  pollfd socket{fd, POLLOUT, 0};
  return ::poll(&socket, 1, 300) == 1 && StateOf(fd) == TCP_ESTABLISHED;
}

// Seen while the kernel still waits for the server, whose queue is full.
TEST(PacingTest, AChannelChoosesBeforeItConnects) {
  asio::io_context io;
  Tcp::acceptor acceptor(io, Tcp::v4());
  acceptor.bind({asio::ip::address_v4::loopback(), 0});
  acceptor.listen(0);
  std::vector<Tcp::socket> others;
  do {
    others.emplace_back(io, Tcp::v4()).non_blocking(true);
    const Tcp::endpoint to = acceptor.local_endpoint();
    ::connect(others.back().native_handle(), to.data(), static_cast<socklen_t>(to.size()));
  } while (Connects(others.back().native_handle()));
  others.pop_back();
  Channel channel(Channel::Options{.peer = "full"});
  channel.SetAddress("127.0.0.1:" + std::to_string(acceptor.local_endpoint().port()));
  std::thread caller([&channel] { EXPECT_FALSE(channel.Call(kEcho, {}, Soon()).ok()); });
  const auto deadline = Soon();
  int socket = -1;
  while (socket < 0 && Clock::now() < deadline) {
    socket = FindDescriptor([](int fd) { return StateOf(fd) == TCP_SYN_SENT; });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::string control = socket < 0 ? "no socket" : ControlOf(socket);
  channel.Close();
  caller.join();
  EXPECT_EQ(control, "reno");
}

}  // namespace
}  // namespace persia::net

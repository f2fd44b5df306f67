// Connections that were cut, so that nothing says so: a filter of the kernel drops what comes in.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <atomic>
#include <future>
#include <thread>

#include "net/channel.h"
#include "net/test_support.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

// The descriptors of this process that are connected from or to `port`, on the client's side or the
// server's.
std::vector<int> Connected(uint16_t port, bool at_server) {
  constexpr int kMost = 4096;
  std::vector<int> found;
  for (int fd = 0; fd < kMost; ++fd) {
    Tcp::endpoint own, peer;
    auto size = static_cast<socklen_t>(own.capacity());
    if (::getsockname(fd, own.data(), &size) != 0) continue;
    size = static_cast<socklen_t>(peer.capacity());
    if (::getpeername(fd, peer.data(), &size) != 0) continue;
    if ((at_server ? own : peer).port() == port) found.push_back(fd);
  }
  return found;
}

// Nothing that is sent to the socket arrives from now on, and it acknowledges nothing.
void Cut(int fd) {
  sock_filter drop = {BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog program = {1, &drop};
  EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)), 0);
}

void CutAll(uint16_t port, bool at_server) {
  const std::vector<int> connected = Connected(port, at_server);
  EXPECT_FALSE(connected.empty());
  for (const int fd : connected) Cut(fd);
}

TEST(CutTest, ARequestThatIsNotAcknowledgedIsSentAgainOnANewConnection) {
  Server server({});
  server.Handle(kEcho, Echo);
  const uint16_t port = server.Start().value();
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  ASSERT_TRUE(channel.Call(kEcho, {}, Soon()).ok());
  CutAll(port, /*at_server=*/true);
  const auto reply = channel.Call(kEcho, {}, Soon());
  EXPECT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(channel.stats().metrics["num_connects"], 2);
}

TEST(CutTest, AReplyThatDoesNotArriveIsAskedForAgainOnANewConnection) {
  std::promise<void> begun, may_answer;
  std::atomic<int> num_begun{0};
  Server server({});
  server.Handle(kEcho, [&](const Buffer& request, const CallContext&) -> StatusOr<Segments> {
    if (num_begun.fetch_add(1) == 0) {
      begun.set_value();
      may_answer.get_future().wait();
    }
    return Copy(request);
  });
  const uint16_t port = server.Start().value();
  Channel channel({.peer = "echo"});
  channel.SetAddress(Loopback(port));
  std::thread caller([&] {
    const auto reply = channel.Call(kEcho, {}, Soon());
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
  });
  begun.get_future().wait();
  CutAll(port, /*at_server=*/false);
  may_answer.set_value();
  caller.join();
  EXPECT_EQ(num_begun, 2);
}

// Takes a connection and never reads from it. Its kernel acknowledges what it has room for.
class BusyPeer {
 public:
  uint16_t port() const { return acceptor_.local_endpoint().port(); }
  void Accept() { accepted_.push_back(acceptor_.accept()); }

 private:
  asio::io_context io_;
  Tcp::acceptor acceptor_{io_, {asio::ip::address_v4::loopback(), 0}};
  std::vector<Tcp::socket> accepted_;
};

// A new connection would have no more of it.
TEST(CutTest, APeerThatDoesNotReadKeepsItsConnection) {
  BusyPeer peer;
  Channel channel({.peer = "busy"});
  channel.SetAddress(Loopback(peer.port()));
  const auto body = Pattern(64 << 20);
  std::thread caller([&] { EXPECT_FALSE(channel.Call(kEcho, SegmentsOf(body), In(8000)).ok()); });
  peer.Accept();
  caller.join();
  EXPECT_EQ(channel.stats().metrics["num_connects"], 1);
}

// The kernel has sent all that there was room for, and asks for more, which is not answered.
TEST(CutTest, APeerThatHadNoRoomAndIsCutOffIsTriedAgain) {
  BusyPeer peer;
  Channel channel({.peer = "busy"});
  channel.SetAddress(Loopback(peer.port()));
  const auto body = Pattern(64 << 20);
  std::thread caller([&] { EXPECT_FALSE(channel.Call(kEcho, SegmentsOf(body), In(30'000)).ok()); });
  peer.Accept();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until its room is used up
  CutAll(peer.port(), /*at_server=*/true);
  peer.Accept();  // of a new connection
  channel.Close();
  caller.join();
}

}  // namespace
}  // namespace persia::net

// The parts of Asio that the net layer uses, in one
// place, and what every socket of ours has in common.
//
// Included by net/ only. channel.h shows it to the other layers, which costs them half a second of
// compile time a file: an Impl that hides it would write each of Channel's members three times.
#pragma once

#include <asio/buffer.hpp>
#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/post.hpp>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <chrono>

namespace persia::net {

using Tcp = asio::ip::tcp;
using ErrorCode = asio::error_code;

// Also an IPv4 address of the loopback in IPv6's form, as a server on all IPv6 addresses sees it.
bool IsLoopback(const asio::ip::address& address);
// For a socket that listens, or connects within its host, before it does so. There is no congestion
// within a host, but the control that the system prefers may pace what is sent by timers (BBR
// does), which costs more than the copies. A connection that has begun with pacing keeps it,
// whatever control it is given later.
void AvoidPacing(int fd);
// Of a connection. No delay for small frames. A peer whose host has died is noticed in half a
// minute instead of never; that needs options which Asio does not wrap. Peers on other hosts get
// the congestion control that the system prefers. Failures are ignored: the connection works
// without them.
void ConfigureSocket(int fd);
// Of a connection that waits for answers, after ConfigureSocket(): it breaks five seconds after the
// peer's host was heard last, unless something is sent meanwhile.
void DetectCuts(int fd);

// What the kernel knows of the bytes that were sent.
struct Unacknowledged {
  bool any = false;  // sent, and not acknowledged; or a question whether there is room
  std::chrono::milliseconds silence;  // since the last acknowledgement of any
};
Unacknowledged UnacknowledgedBy(int fd);

}  // namespace persia::net

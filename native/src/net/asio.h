// The parts of Asio that the net layer uses, in one
// place, and what every socket of ours has in common.
//
// Included by net/ only. channel.h shows it to the other layers, which costs them half a second of
// compile time a file: an Impl that hides it would write each of Channel's members three times.
#pragma once

#include <asio/buffer.hpp>
#include <asio/connect.hpp>
#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/post.hpp>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>

namespace persia::net {

using Tcp = asio::ip::tcp;
using ErrorCode = asio::error_code;

// No delay for small frames, and none by pacing within a host. A peer whose host has died is
// noticed in half a minute instead of never; that needs options which Asio does not wrap. Failures
// are ignored: the connection works without them.
void ConfigureSocket(int fd);

}  // namespace persia::net

// Round trips of our RPC beside those of a bare socket and of an Asio server, over the loopback.
//
// The bare side is the floor: a blocking socket on each end; the peer receives the whole message
// into a buffer that it keeps, and sends it back. The RPC side is net::Channel against net::Server,
// with a handler that builds its reply as real ones do, a new Buffer that is then filled. A message
// has the same body on both sides; the RPC adds its header.
//
// The Asio side answers docs/adr/0024-the-server-waits-on-epoll.md: the same net::Channel against a
// server of as many threads on one asio::io_context. It speaks the same frames, and has none of
// Server's limits, deadlines and counters: what a server on Asio would cost at least.
//
// A program of its own rather than Google Benchmark, because the two sides take turns: blocks of
// calls alternate, so that a noisy machine disturbs both alike, and medians of blocks are compared,
// over several pairs of fresh connections and threads.
// The placements, of client thread and server threads:
//   free       wherever the scheduler puts them
//   one core   both on CPU 0
//   two cores  client on CPU 0, server on CPU 1
// Then the calls per second of four callers, each with a connection of its own, placed freely.
#include <netinet/tcp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "net/asio.h"
#include "net/channel.h"
#include "net/message.h"
#include "net/server.h"

namespace persia::net {
namespace {

constexpr int kSetups = 9;  // where the scheduler puts new threads is chance
constexpr int kRounds = 5;
constexpr int kWarmUpCalls = 20;
constexpr MethodId kEcho{1, "Echo"};

struct Placement {
  const char* name;
  int client_cpu;  // -1: any
  int server_cpu;
};

// Of the calling thread; threads that it starts inherit it.
void RunOn(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (cpu < 0 || cpu == i) CPU_SET(i, &cpus);
  }
  if (::sched_setaffinity(0, sizeof(cpus), &cpus) != 0) {
    std::fprintf(stderr, "CPU %d is not there; the figures of this placement are of any CPU\n",
                 cpu);
  }
}

void Require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

class BareEcho {
 public:
  BareEcho(size_t size_bytes, const Placement& placement)
      : acceptor_(io_, {asio::ip::address_v4::loopback(), 0}), client_(io_), reply_(size_bytes) {
    RunOn(placement.server_cpu);
    peer_ = std::thread([this, size_bytes] { Serve(size_bytes); });
    RunOn(placement.client_cpu);
    client_.connect(acceptor_.local_endpoint());
    client_.set_option(Tcp::no_delay(true));
  }
  ~BareEcho() {
    client_.close();
    peer_.join();
  }
  void Call(const std::vector<std::byte>& request) {
    asio::write(client_, asio::buffer(request));
    asio::read(client_, asio::buffer(reply_));
  }
  const std::vector<std::byte>& reply() const { return reply_; }

 private:
  void Serve(size_t size_bytes) {
    Tcp::socket socket = acceptor_.accept();
    socket.set_option(Tcp::no_delay(true));
    std::vector<std::byte> message(size_bytes);
    ErrorCode error;
    while (asio::read(socket, asio::buffer(message), error) == size_bytes && !error) {
      asio::write(socket, asio::buffer(message), error);
    }
  }

  asio::io_context io_;
  Tcp::acceptor acceptor_;
  Tcp::socket client_;
  std::vector<std::byte> reply_;
  std::thread peer_;
};

class RpcServer {
 public:
  explicit RpcServer(const Placement& placement) {
    RunOn(placement.server_cpu);
    server_.Handle(kEcho, [](const Buffer& request, const CallContext&) {
      Segments segments;
      segments.AddOwned(Copy(request));
      return StatusOr<Segments>(std::move(segments));
    });
    auto port = server_.Start();
    Require(port.ok(), "the server does not start");
    port_ = *port;
  }
  static Buffer Copy(const Buffer& request) {
    Buffer reply(request.size());
    std::memcpy(reply.data(), request.data(), request.size());
    return reply;
  }
  uint16_t port() const { return port_; }

 private:
  Server server_{Server::Options{}};
  uint16_t port_ = 0;
};

class AsioServer {
 public:
  explicit AsioServer(const Placement& placement)
      : acceptor_(io_, {asio::ip::address_v4::loopback(), 0}) {
    RunOn(placement.server_cpu);
    Accept();
    const Server::Options options;  // as many threads as our server has
    for (uint32_t i = 0; i < options.num_io_threads + options.num_handler_threads; ++i) {
      threads_.emplace_back([this] { io_.run(); });
    }
  }
  ~AsioServer() {
    io_.stop();
    for (std::thread& thread : threads_) thread.join();
  }
  uint16_t port() const { return acceptor_.local_endpoint().port(); }

 private:
  struct Session : std::enable_shared_from_this<Session> {
    explicit Session(Tcp::socket accepted) : socket(std::move(accepted)) {
      ConfigureSocket(socket.native_handle());
    }
    void ReadHeader() {
      asio::async_read(socket, asio::buffer(bytes), [self = shared_from_this()](auto error, auto) {
        if (error) return;
        self->header = DecodeHeader(self->bytes, 1 << 30).value();
        self->body = Buffer(self->header.body_bytes);
        self->ReadBody();
      });
    }
    void ReadBody() {
      asio::async_read(socket, asio::buffer(body.data(), body.size()),
                       [self = shared_from_this()](auto error, auto) {
                         if (!error) self->Answer();
                       });
    }
    void Answer() {
      body = RpcServer::Copy(body);
      header.kind = FrameKind::kReply;
      EncodeHeader(header, bytes);
      const std::array frame = {asio::const_buffer(asio::buffer(bytes)),
                                asio::const_buffer(body.data(), body.size())};
      asio::async_write(socket, frame, [self = shared_from_this()](auto error, auto) {
        if (!error) self->ReadHeader();
      });
    }

    Tcp::socket socket;
    std::array<std::byte, kHeaderBytes> bytes;
    FrameHeader header;
    Buffer body;
  };

  void Accept() {
    acceptor_.async_accept([this](auto error, Tcp::socket socket) {
      if (error) return;
      std::make_shared<Session>(std::move(socket))->ReadHeader();
      Accept();
    });
  }

  asio::io_context io_;
  Tcp::acceptor acceptor_;
  std::vector<std::thread> threads_;
};

// Calls of a Channel to one of the two servers.
template <typename EchoServer>
class RpcEcho {
 public:
  explicit RpcEcho(const Placement& placement) : server_(placement) {
    RunOn(placement.client_cpu);
    channel_ = MakeChannel();
  }
  std::unique_ptr<Channel> MakeChannel() const {
    auto channel = std::make_unique<Channel>(Channel::Options{.peer = "echo"});
    channel->SetAddress("127.0.0.1:" + std::to_string(server_.port()));
    return channel;
  }
  Buffer Call(const std::vector<std::byte>& request) { return CallOver(*channel_, request); }
  static Buffer CallOver(Channel& channel, const std::vector<std::byte>& request) {
    Segments segments;
    segments.AddView(request);
    auto reply = channel.Call(kEcho, segments, Clock::now() + std::chrono::seconds(30));
    Require(reply.ok(), reply.status().message().c_str());
    return std::move(reply).value();
  }

 private:
  EchoServer server_;
  std::unique_ptr<Channel> channel_;
};

double MicrosecondsPerCall(int num_calls, const std::function<void()>& call) {
  const auto begin = Clock::now();
  for (int i = 0; i < num_calls; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / num_calls;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Compare(size_t size_bytes, int calls_per_block, const Placement& placement) {
  const std::vector<std::byte> request(size_bytes, std::byte{42});
  std::vector<double> bare_us, rpc_us, asio_us;
  for (int setup = 0; setup < kSetups; ++setup) {
    BareEcho bare(size_bytes, placement);
    RpcEcho<RpcServer> rpc(placement);
    RpcEcho<AsioServer> asio(placement);
    for (int i = 0; i < kWarmUpCalls; ++i) {
      bare.Call(request);
      Require(bare.reply() == request && std::ranges::equal(rpc.Call(request).span(), request) &&
                  std::ranges::equal(asio.Call(request).span(), request),
              "a wrong echo");
    }
    for (int round = 0; round < kRounds; ++round) {
      bare_us.push_back(MicrosecondsPerCall(calls_per_block, [&] { bare.Call(request); }));
      rpc_us.push_back(MicrosecondsPerCall(calls_per_block, [&] { rpc.Call(request); }));
      asio_us.push_back(MicrosecondsPerCall(calls_per_block, [&] { asio.Call(request); }));
    }
  }
  const double floor = Median(bare_us);
  const double ours = Median(rpc_us);
  const double asio = Median(asio_us);
  std::printf("%9zu  %-9s  %9.1f  %9.1f  %9.1f  %10.2f  %10.2f\n", size_bytes, placement.name,
              floor, ours, asio, ours / floor, asio / ours);
  std::fflush(stdout);
}

// Thousands of calls a second that callers make side by side.
template <typename Echo>
double Throughput(const Echo& echo, const std::vector<std::byte>& request, int calls) {
  constexpr int kCallers = 4;
  std::vector<std::unique_ptr<Channel>> channels;
  for (int i = 0; i < kCallers; ++i) {
    channels.push_back(echo.MakeChannel());
    Echo::CallOver(*channels[i], request);
  }
  const auto begin = Clock::now();
  std::vector<std::thread> callers;
  for (auto& channel : channels) {
    callers.emplace_back([&] {
      for (int i = 0; i < calls; ++i) Echo::CallOver(*channel, request);
    });
  }
  for (std::thread& caller : callers) caller.join();
  return kCallers * calls / std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

void CompareThroughput(size_t size_bytes, int calls, const Placement& anywhere) {
  const std::vector<std::byte> request(size_bytes, std::byte{42});
  std::vector<double> ours, asios;
  for (int setup = 0; setup < kSetups; ++setup) {
    const RpcEcho<RpcServer> rpc(anywhere);
    const RpcEcho<AsioServer> asio(anywhere);
    ours.push_back(Throughput(rpc, request, calls));
    asios.push_back(Throughput(asio, request, calls));
  }
  std::printf("%9zu  4 callers: %.1f thousand calls/s, Asio %.1f, ratio %.2f\n", size_bytes,
              Median(ours), Median(asios), Median(asios) / Median(ours));
}

}  // namespace
}  // namespace persia::net

int main() {
  using persia::net::Compare;
  using persia::net::Placement;
  std::printf("%9s  %-9s  %9s  %9s  %9s  %10s  %10s\n", "bytes", "placement", "bare us", "rpc us",
              "asio us", "rpc/bare", "asio/rpc");
  const Placement anywhere{"free", -1, -1};
  for (const Placement& placement : {anywhere, {"one core", 0, 0}, {"two cores", 0, 1}}) {
    Compare(64, 500, placement);
    Compare(4096, 500, placement);
    Compare(65536, 200, placement);
    Compare(1 << 20, 20, placement);
  }
  persia::net::CompareThroughput(64, 2000, anywhere);
  persia::net::CompareThroughput(65536, 500, anywhere);
}

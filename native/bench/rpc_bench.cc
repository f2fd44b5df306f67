// Round trips of our RPC beside those of a bare socket, over the loopback.
//
// The bare side is the floor: a blocking socket on each end; the peer receives the whole message
// into a buffer that it keeps, and sends it back. The RPC side is net::Channel against net::Server,
// with a handler that builds its reply as real ones do, a new Buffer that is then filled. A message
// has the same body on both sides; the RPC adds its header.
//
// A program of its own rather than Google Benchmark, because the two sides take turns: blocks of
// calls alternate, so that a noisy machine disturbs both alike, and medians of blocks are compared,
// over several pairs of fresh connections and threads.
// The placements, of client thread and server threads:
//   free       wherever the scheduler puts them
//   one core   both on CPU 0
//   two cores  client on CPU 0, server on CPU 1
#include <netinet/tcp.h>
#include <sched.h>

#include <algorithm>
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

class RpcEcho {
 public:
  explicit RpcEcho(const Placement& placement) {
    RunOn(placement.server_cpu);
    server_.Handle(kEcho, [](const Buffer& request, const CallContext&) {
      Buffer reply(request.size());
      std::memcpy(reply.data(), request.data(), request.size());
      Segments segments;
      segments.AddOwned(std::move(reply));
      return StatusOr<Segments>(std::move(segments));
    });
    auto port = server_.Start();
    Require(port.ok(), "the server does not start");
    RunOn(placement.client_cpu);
    channel_ = std::make_unique<Channel>(Channel::Options{.peer = "echo"});
    channel_->SetAddress("127.0.0.1:" + std::to_string(*port));
  }
  Buffer Call(const std::vector<std::byte>& request) {
    Segments segments;
    segments.AddView(request);
    auto reply = channel_->Call(kEcho, segments, Clock::now() + std::chrono::seconds(30));
    Require(reply.ok(), reply.status().message().c_str());
    return std::move(reply).value();
  }

 private:
  Server server_{Server::Options{}};
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
  std::vector<double> bare_us;
  std::vector<double> rpc_us;
  for (int setup = 0; setup < kSetups; ++setup) {
    BareEcho bare(size_bytes, placement);
    RpcEcho rpc(placement);
    for (int i = 0; i < kWarmUpCalls; ++i) {
      bare.Call(request);
      const Buffer reply = rpc.Call(request);
      Require(bare.reply() == request && std::ranges::equal(reply.span(), request), "a wrong echo");
    }
    for (int round = 0; round < kRounds; ++round) {
      bare_us.push_back(MicrosecondsPerCall(calls_per_block, [&] { bare.Call(request); }));
      rpc_us.push_back(MicrosecondsPerCall(calls_per_block, [&] { rpc.Call(request); }));
    }
  }
  const double floor = Median(bare_us);
  const double ours = Median(rpc_us);
  std::printf("%9zu  %-9s  %9.1f  %9.1f  %10.2f  %11.2f\n", size_bytes, placement.name, floor, ours,
              ours / floor, floor / ours);
  std::fflush(stdout);
}

}  // namespace
}  // namespace persia::net

int main() {
  using persia::net::Compare;
  std::printf("%9s  %-9s  %9s  %9s  %10s  %11s\n", "bytes", "placement", "bare us", "rpc us",
              "time ratio", "speed ratio");
  for (const persia::net::Placement& placement :
       {persia::net::Placement{"free", -1, -1}, {"one core", 0, 0}, {"two cores", 0, 1}}) {
    Compare(64, 500, placement);
    Compare(4096, 500, placement);
    Compare(65536, 200, placement);
    Compare(1 << 20, 20, placement);
  }
}

// The bytes of a batch's way through a cluster and nothing else: what its sockets cost at least.
//
// Blocking TCP sockets on the loopback between a caller, a thread in the embedding worker's place
// and two in the parameter servers', the messages of a lookup and of an update in their order and
// sizes. Each end keeps its buffers; nothing is looked up, summed or copied besides.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

namespace persia::bench {

// Sizes in bytes; of one server, where there are two.
struct BatchBytes {
  size_t ids = 0, embeddings = 0, gradients = 0;
  size_t signs = 0, rows = 0;  // a server's update carries both

  static constexpr size_t kReport = 64;
  // Of one message.
  size_t Most() const { return std::max({ids, embeddings, gradients, signs + rows, kReport}); }
};

class BareSockets {
 public:
  explicit BareSockets(const BatchBytes& bytes) : bytes_(bytes), memory_(bytes.Most()) {
    client_ = Connect();
    for (auto& server : servers_) server = Connect();
    threads_.emplace_back([this] { WorkAsWorker(); });
    for (auto& server : servers_) threads_.emplace_back([&] { WorkAsServer(server.second); });
  }
  ~BareSockets() {
    ::shutdown(client_.first, SHUT_RDWR);
    for (auto& server : servers_) ::shutdown(server.first, SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
    for (const auto& [a, b] : {client_, servers_[0], servers_[1]}) {
      ::close(a);
      ::close(b);
    }
  }
  // By one thread at a time.
  void Train() {
    Send(client_.first, memory_, bytes_.ids);
    Receive(client_.first, memory_, bytes_.embeddings);
    Send(client_.first, memory_, bytes_.gradients);
    Receive(client_.first, memory_, kReport);
  }

 private:
  using Ends = std::pair<int, int>;
  using Memory = std::vector<std::byte>;
  static constexpr size_t kReport = BatchBytes::kReport;

  static Ends Connect() {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    const int caller = ::socket(AF_INET, SOCK_STREAM, 0);
    // Before they connect: else the system's congestion control may pace them for good.
    for (const int end : {listener, caller}) {
      ::setsockopt(end, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    }
    const bool ok = ::bind(listener, any, size) == 0 && ::listen(listener, 1) == 0 &&
                    ::getsockname(listener, any, &size) == 0 && ::connect(caller, any, size) == 0;
    const Ends ends = {caller, ok ? ::accept(listener, nullptr, nullptr) : -1};
    ::close(listener);
    if (ends.second < 0) {
      std::perror("loopback");
      std::exit(1);
    }
    constexpr int kOn = 1;
    for (const int end : {ends.first, ends.second}) {
      ::setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof(kOn));
    }
    return ends;
  }
  static bool Send(int socket, Memory& memory, size_t size) {
    for (size_t sent = 0; sent < size;) {
      const ssize_t more = ::send(socket, memory.data() + sent, size - sent, MSG_NOSIGNAL);
      if (more <= 0) return false;
      sent += static_cast<size_t>(more);
    }
    return true;
  }
  static bool Receive(int socket, Memory& memory, size_t size) {
    for (size_t received = 0; received < size;) {
      const ssize_t more = ::recv(socket, memory.data() + received, size - received, 0);
      if (more <= 0) return false;
      received += static_cast<size_t>(more);
    }
    return true;
  }

  bool CallServers(Memory& memory, size_t request, size_t reply) {
    bool ok = true;
    for (auto& server : servers_) ok = ok && Send(server.first, memory, request);
    for (auto& server : servers_) ok = ok && Receive(server.first, memory, reply);
    return ok;
  }
  void WorkAsWorker() {
    Memory memory(bytes_.Most());
    const int client = client_.second;
    while (Receive(client, memory, bytes_.ids) && CallServers(memory, bytes_.signs, bytes_.rows) &&
           Send(client, memory, bytes_.embeddings) && Receive(client, memory, bytes_.gradients) &&
           CallServers(memory, bytes_.signs + bytes_.rows, kReport) &&
           Send(client, memory, kReport)) {
    }
  }
  void WorkAsServer(int socket) {
    Memory memory(bytes_.Most());
    while (Receive(socket, memory, bytes_.signs) && Send(socket, memory, bytes_.rows) &&
           Receive(socket, memory, bytes_.signs + bytes_.rows) && Send(socket, memory, kReport)) {
    }
  }

  const BatchBytes bytes_;
  Memory memory_;  // the caller's
  Ends client_;
  std::array<Ends, 2> servers_;
  std::vector<std::thread> threads_;
};

}  // namespace persia::bench

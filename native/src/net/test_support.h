// What the tests of the net and server layers share: an echo server, a raw socket, and deadlines.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "net/asio.h"
#include "net/server.h"

namespace persia::net::testing {

// Long enough for a loaded machine; nothing waits for it unless a test fails.
inline Clock::time_point Soon() { return Clock::now() + std::chrono::seconds(120); }
inline Clock::time_point In(int milliseconds) {
  return Clock::now() + std::chrono::milliseconds(milliseconds);
}

// How a call fails that a channel repeats until its deadline: with a reason that has `text`. A
// machine may be too busy to reach the peer by a short deadline; then the call is made again.
template <typename Call>
Status FailureOf(Call call, const std::string& text, int deadline_ms) {
  const auto end = Soon();
  while (true) {
    const Status status = call(In(deadline_ms));
    const bool is_told = status.message().find(text) != std::string::npos;
    if (status.ok() || is_told || Clock::now() > end) return status;
  }
}

// A port on which nothing listens. It stays bound: no other process of the machine can take it.
class ClosedPort {
 public:
  uint16_t number() const { return socket_.local_endpoint().port(); }

 private:
  asio::io_context io_;
  Tcp::socket socket_{io_, {asio::ip::address_v4::loopback(), 0}};
};

// Methods of these tests alone.
inline constexpr MethodId kEcho{1, "Echo"}, kBlock{2, "Block"}, kRefuse{3, "Refuse"},
    kUnhandled{4, "Unhandled"};

inline std::vector<std::byte> Pattern(size_t size, uint32_t seed = 0) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 31 + seed) >> 3);
  return bytes;
}

inline Segments SegmentsOf(std::span<const std::byte> bytes) {
  Segments segments;
  segments.AddView(bytes);
  return segments;
}

inline Segments Copy(const Buffer& bytes) {
  Segments segments;
  segments.AddOwned(std::vector<std::byte>(bytes.data(), bytes.data() + bytes.size()));
  return segments;
}

inline bool SameBytes(const Buffer& a, std::span<const std::byte> b) {
  return a.size() == b.size() && (b.empty() || std::memcmp(a.data(), b.data(), b.size()) == 0);
}

inline StatusOr<Segments> Echo(const Buffer& request, const CallContext&) { return Copy(request); }

inline std::string Loopback(uint16_t port) { return "127.0.0.1:" + std::to_string(port); }

// A blocking socket that says whatever it is told to. One thread may send while another receives.
class RawClient {
 public:
  explicit RawClient(uint16_t port) : socket_(io_) {
    ErrorCode error;
    socket_.connect({asio::ip::address_v4::loopback(), port}, error);
    connected_ = !error;
    const timeval timeout{120, 0};
    ::setsockopt(socket_.native_handle(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  }
  bool connected() const { return connected_; }
  // A server that has closed is noticed when receiving.
  void Send(std::span<const std::byte> bytes) {
    ErrorCode ignored;
    asio::write(socket_, asio::buffer(bytes.data(), bytes.size()), ignored);
  }
  void SendFrame(const FrameHeader& header, std::span<const std::byte> body = {}) {
    std::array<std::byte, kHeaderBytes> bytes;
    EncodeHeader(header, bytes);
    Send(bytes);
    Send(body);
  }
  // False when the server has closed instead.
  bool Receive(FrameHeader* header, std::string* body) {
    ErrorCode error;
    std::array<std::byte, kHeaderBytes> bytes;
    asio::read(socket_, asio::buffer(bytes), error);
    if (error) return false;
    auto decoded = DecodeHeader(bytes, 1ull << 30);
    if (!decoded.ok()) return false;
    *header = *decoded;
    body->resize(header->body_bytes);
    asio::read(socket_, asio::buffer(*body), error);
    return !error;
  }
  bool ClosedByServer() {
    ErrorCode error;
    std::byte byte;
    asio::read(socket_, asio::buffer(&byte, 1), error);
    return error == asio::error::eof || error == asio::error::connection_reset;
  }

 private:
  asio::io_context io_;
  Tcp::socket socket_;
  bool connected_ = false;
};

}  // namespace persia::net::testing

// A call of a connection, as the parts of GrpcConnection know it. Private to them.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "serving/grpc_connection.h"

namespace persia::serving {

constexpr size_t kPrefixBytes = 5;  // of a message: whether it is compressed, its length
constexpr size_t kMaxHeaderBytes = 16 << 10;
constexpr int32_t kStreamWindow = 1 << 20;

inline std::string_view View(const uint8_t* bytes, size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

struct GrpcConnection::Stream {
  size_t unread() const { return outgoing.size() - read_bytes; }
  bool must_send() const { return !is_finished && (!has_begun || prefix_bytes != 0); }
  bool must_take() const { return is_finished || !outgoing.empty(); }

  int32_t id = 0;
  CallId call = 0;  // 0: the handler does not know it
  CallHead head;
  bool is_post = false;
  bool is_grpc = false;
  size_t header_bytes = 0;
  uint32_t num_authorizations = 0;
  bool has_begun = false;  // its header fields are complete

  std::array<std::byte, kPrefixBytes> prefix{};
  size_t prefix_bytes = 0;
  uint64_t message_bytes = 0;  // of the message that arrives
  uint32_t num_messages = 0;
  std::vector<std::byte> message;
  std::shared_ptr<CallBytes> held;
  bool has_ended = false;  // the client sends no more

  std::string outgoing;  // framed messages, the first read_bytes of them taken
  size_t read_bytes = 0;
  bool has_responded = false;
  bool is_deferred = false;
  bool is_finished = false;
  bool is_reset = false;
  GrpcCode code = GrpcCode::kOk;
  std::string text;
  net::Clock::time_point due = net::Clock::time_point::max();  // of an answer
  // When the client last sent bytes, and last took some or got the first to take.
  net::Clock::time_point sent_at;
  net::Clock::time_point taken_at;
};

}  // namespace persia::serving

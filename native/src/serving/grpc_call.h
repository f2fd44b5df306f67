// What the server of gRPC and the handler of its calls tell each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/tls.h"
#include "net/types.h"
#include "serving/call_bytes.h"
#include "serving/request_counts.h"

namespace persia::serving {

// The number of a call in its server; never used again.
using CallId = uint64_t;

struct CallHead {
  std::string method;                        // "/package.Service/Method"
  std::optional<std::string> authorization;  // none also where there are several
  std::string encoding;                      // of messages that are marked as compressed
  std::string peer;
  net::Clock::time_point arrived;  // when the bytes of the call did
  std::optional<net::Clock::time_point> deadline;
  std::string draw_id;  // in the place of the ID of a request that has none and was drawn
};

struct GrpcMessage {
  std::vector<std::byte> bytes;
  bool is_compressed = false;
  std::shared_ptr<CallBytes> held;  // kept as long as the bytes, or what was made of them
};

// What becomes of a call that begins.
struct CallVerdict {
  net::Clock::time_point due = net::Clock::time_point::max();  // when OnLate is to be called
  GrpcCode code = GrpcCode::kOk;  // another one: it is refused, and the handler hears no more of it
  std::string text = {};          // of a refusal
};

// Called on the server's thread alone, and must not block it.
class CallHandler {
 public:
  virtual ~CallHandler() = default;

  // Before any of its messages.
  virtual CallVerdict OnCall(CallId call, const CallHead& head) = 0;
  virtual void OnMessage(CallId call, GrpcMessage message) = 0;
  // The client sends no more messages.
  virtual void OnEnd(CallId call) = 0;
  // The call is not finished. The server finishes it afterwards, if the handler has not.
  virtual void OnLate(CallId call) = 0;
  // The server refuses what the client sends for it, and finishes it afterwards with `code`.
  virtual void OnRefused(CallId call, GrpcCode code) = 0;
  // The last of a call, answered or not. What is sent for it from now on is dropped.
  virtual void OnClosed(CallId call) = 0;
};

// Bounds. What exceeds one is refused.
struct GrpcOptions {
  uint64_t max_message_bytes = 16ull << 20;
  uint64_t max_held_bytes = 1ull << 30;  // of messages that arrive, wait or are to be sent
  uint32_t max_calls = 1024;             // that are open
  uint32_t max_connections = 4096;       // the limit of open files may permit fewer
  // With a client that begins no call, or does not read or send what it should.
  std::chrono::milliseconds patience{10'000};
  // For how long after many refusals clients are to send header fields alone.
  std::chrono::milliseconds overload{1000};
  std::shared_ptr<net::TlsFiles> tls;  // null: none
};

}  // namespace persia::serving

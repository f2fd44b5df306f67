// Frames: the only thing that crosses an RPC connection. Layout in docs/wire_format.md.
//
// A frame is a 32-byte header and a body. The parser takes bytes and knows no socket; a length is
// checked against the limit before anything is allocated. An unknown version or method gets a typed
// refusal, and the connection survives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"

namespace persia::net {

inline constexpr uint32_t kMagic = 0x41535250;  // "PRSA"
inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kHeaderBytes = 32;

enum class FrameKind : uint8_t { kRequest = 1, kReply = 2 };

// The methods of all roles; numbers are never reused.
enum class Method : uint8_t {
  kPing = 1,
  // parameter server
  kConfigureServer = 16,
  kLookupRows = 17,
  kUpdateRows = 18,
  kSetRows = 19,
  kServerStats = 20,
  kClearRows = 21,
  kCountRows = 22,
  kPrefetchRows = 23,
  // embedding worker
  kConfigureWorker = 32,
  kLookupReference = 33,
  kLookupDirect = 34,
  kReturnGradients = 35,
  kReleaseReference = 36,
  kWorkerStats = 37,
  kClearEmbeddings = 38,
  kSetEmbeddings = 39,
  kRegisterBatch = 40,
};

// For messages: "LookupRows".
std::string_view MethodName(Method method);

struct FrameHeader {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  FrameKind kind = FrameKind::kRequest;
  uint8_t method = 0;
  uint8_t status = 0;  // a StatusCode; replies only. Not Ok: the body is the message text
  uint64_t request_id = 0;
  uint32_t deadline_ms = 0;  // time left for the request when it was sent
  uint32_t batch = 0;        // requests: TracedBatch::tag() of the caller, for traces; 0: none
  uint64_t body_bytes = 0;
};
static_assert(sizeof(FrameHeader) == kHeaderBytes);

void EncodeHeader(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out);
// kCorruption: wrong magic or kind, body above `max_body_bytes` (the
// connection must be closed, for the stream is lost). An unknown version
// is not an error here: the caller refuses the request and skips the body.
StatusOr<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes,
                                   uint64_t max_body_bytes);

// Bytes to send, in parts that are written with one scatter/gather call from where they lie.
// `owned` keeps alive what the parts of a reply point to; the parts of a request are kept alive by
// the caller until the call returns.
struct Parts {
  std::vector<std::span<const std::byte>> views;
  std::vector<std::shared_ptr<const void>> owned;

  void AddView(std::span<const std::byte> view) { views.push_back(view); }
  // Takes over the bytes and appends a view of them.
  void AddOwned(std::vector<std::byte> bytes);
  void AddOwned(Buffer buffer);
  uint64_t size_bytes() const;
};

}  // namespace persia::net

// Frames: the only thing that crosses an RPC connection. Layout in docs/wire_format.md.
//
// A frame is a 32-byte header and a body. The parser takes bytes and knows no socket; a length is
// checked against the limit before anything is allocated. An unknown version or method gets a typed
// refusal, and the connection survives. FrameWriter sends one frame into a socket that does not
// block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/method.h"
#include "base/status.h"

namespace persia::net {

inline constexpr uint32_t kMagic = 0x41535250;  // "PRSA"
inline constexpr uint8_t kVersion = 2;
inline constexpr size_t kHeaderBytes = 32;

class TlsStream;

enum class FrameKind : uint8_t { kRequest = 1, kReply = 2 };

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

// Fields in the byte order of the host: both ends of a job are little-endian (docs/wire_format.md).
void EncodeHeader(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out);
// kCorruption: wrong magic or kind, or a body above `max_body_bytes`. The connection must then be
// closed, because the stream is lost. An unknown version is not an error here: the caller refuses
// the request and skips the body.
StatusOr<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes,
                                   uint64_t max_body_bytes);

// One frame on its way into a socket. Header and segments leave with as few system calls as they
// fit in, from where they lie. Not thread-safe.
class FrameWriter {
 public:
  enum class Result { kDone, kBlocked, kBroken };

  // `header.body_bytes` is set here. The segments must stay as they are until the frame is written.
  FrameWriter(FrameHeader header, const Segments& body);

  // Sends on; errno tells why when it is kBroken. `tls`: the stream over `fd`, if there is one.
  Result Write(int fd, TlsStream* tls = nullptr);
  // Of the body alone, which is what counts against the limits of a connection.
  uint64_t body_bytes() const { return body_bytes_; }

 private:
  Result WriteTls(TlsStream& tls);
  std::span<const std::byte> NextRecord();
  std::span<const std::byte> Piece(size_t index) const;
  void Advance(size_t num_bytes);

  std::array<std::byte, kHeaderBytes> header_;
  const Segments* body_;
  uint64_t body_bytes_;
  // Piece 0 is the header, piece i + 1 is view i of the body.
  size_t piece_ = 0;
  size_t offset_ = 0;              // bytes of the current piece that are out
  std::vector<std::byte> record_;  // of TLS, where it is made of several pieces
};

}  // namespace persia::net

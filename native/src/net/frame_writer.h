// FrameWriter: one frame on its way into a socket that does not block. Private to net/.
//
// Header and segments leave with as few system calls as they fit in, from where they lie. Not
// thread-safe.
#pragma once

#include <array>
#include <cstddef>

#include "base/method.h"
#include "net/message.h"

namespace persia::net {

class FrameWriter {
 public:
  enum class Result { kDone, kBlocked, kBroken };

  // `header.body_bytes` is set here. The segments must stay as they are until the frame is written.
  FrameWriter(FrameHeader header, const Segments& body);

  // Sends on; errno tells why when it is kBroken.
  Result Write(int fd);
  uint64_t body_bytes() const { return body_bytes_; }

 private:
  std::span<const std::byte> Piece(size_t index) const;
  void Advance(size_t num_bytes);

  std::array<std::byte, kHeaderBytes> header_;
  const Segments* body_;
  uint64_t body_bytes_;
  // Piece 0 is the header, piece i + 1 is view i of the body.
  size_t piece_ = 0;
  size_t offset_ = 0;  // bytes of the current piece that are out
};

}  // namespace persia::net

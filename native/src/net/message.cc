#include "net/message.h"

#include <cstring>
#include <string>

namespace persia::net {

void EncodeHeader(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out) {
  std::memcpy(out.data(), &header, kHeaderBytes);
}

StatusOr<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes,
                                   uint64_t max_body_bytes) {
  FrameHeader header;
  std::memcpy(&header, bytes.data(), kHeaderBytes);
  if (header.magic != kMagic) {
    return Corruption("frame: magic is " + std::to_string(header.magic) + " instead of " +
                      std::to_string(kMagic) + "; the peer does not speak this protocol");
  }
  if (header.kind != FrameKind::kRequest && header.kind != FrameKind::kReply) {
    return Corruption("frame: kind is " + std::to_string(static_cast<int>(header.kind)) +
                      "; it must be 1 or 2");
  }
  if (header.body_bytes > max_body_bytes) {
    return Corruption("frame: a body of " + std::to_string(header.body_bytes) +
                      " bytes is above the limit of " + std::to_string(max_body_bytes) +
                      "; send smaller batches");
  }
  return header;
}

}  // namespace persia::net

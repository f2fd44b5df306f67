#include "net/message.h"

#include <cstring>
#include <string>
#include <utility>

namespace persia::net {

std::string_view MethodName(Method method) {
  switch (method) {
    case Method::kPing: return "Ping";
    case Method::kConfigureServer: return "ConfigureServer";
    case Method::kLookupRows: return "LookupRows";
    case Method::kUpdateRows: return "UpdateRows";
    case Method::kSetRows: return "SetRows";
    case Method::kServerStats: return "ServerStats";
    case Method::kClearRows: return "ClearRows";
    case Method::kCountRows: return "CountRows";
    case Method::kPrefetchRows: return "PrefetchRows";
    case Method::kConfigureWorker: return "ConfigureWorker";
    case Method::kLookupReference: return "LookupReference";
    case Method::kLookupDirect: return "LookupDirect";
    case Method::kReturnGradients: return "ReturnGradients";
    case Method::kReleaseReference: return "ReleaseReference";
    case Method::kWorkerStats: return "WorkerStats";
    case Method::kClearEmbeddings: return "ClearEmbeddings";
    case Method::kSetEmbeddings: return "SetEmbeddings";
    case Method::kRegisterBatch: return "RegisterBatch";
  }
  return "an unknown method";
}

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

void Parts::AddOwned(std::vector<std::byte> bytes) {
  auto kept = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  views.emplace_back(*kept);
  owned.push_back(std::move(kept));
}

void Parts::AddOwned(Buffer buffer) {
  auto kept = std::make_shared<const Buffer>(std::move(buffer));
  views.push_back(kept->span());
  owned.push_back(std::move(kept));
}

uint64_t Parts::size_bytes() const {
  uint64_t size = 0;
  for (const auto& view : views) size += view.size();
  return size;
}

}  // namespace persia::net

// Bodies of the embedding worker's methods that are small (docs/wire_format.md), for both ends of
// the connection. ReturnGradients: worker/gradients_codec.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "net/message.h"

namespace persia::worker {

// A batch, in the body of ReleaseReference and in the reply of RegisterBatch.
struct ReferenceBody {
  uint64_t worker_incarnation = 0;
  uint64_t reference = 0;
};
static_assert(sizeof(ReferenceBody) == 16);

struct LookupReferenceBody {
  ReferenceBody reference;
  uint32_t requires_grad = 0;
  uint32_t wire_dtype = 0;  // a WireDtype: that of the embeddings asked for
  uint32_t parts = 0;       // LookupParts
  uint32_t reserved = 0;
};
static_assert(sizeof(LookupReferenceBody) == 32);

// The head of LookupDirect's body; ID features follow.
struct LookupDirectHead {
  uint32_t requires_grad = 0;
  uint32_t wire_dtype = 0;  // a WireDtype: that of the embeddings asked for
  uint32_t parts = 0;       // LookupParts
  uint32_t reserved = 0;
};
static_assert(sizeof(LookupDirectHead) == 16);

// The head of RegisterBatch's body; ID features follow.
struct RegisterBatchHead {
  uint32_t loader_index = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(RegisterBatchHead) == 8);

// The head of WorkerStats' reply; u64 rows[num_servers] follow.
struct WorkerStatsHead {
  uint32_t num_servers = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(WorkerStatsHead) == 8);

template <typename T>
std::vector<std::byte> EncodeFixed(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

// The structure that `body` begins with; `*rest` is what follows it. kCorruption: too short.
template <typename T>
StatusOr<T> DecodeHead(std::span<const std::byte> body, const char* message,
                       std::span<const std::byte>* rest) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (body.size() < sizeof(T)) {
    return Corruption(std::string(message) + " of " + std::to_string(body.size()) +
                      " bytes; it has at least " + std::to_string(sizeof(T)));
  }
  T value;
  std::memcpy(&value, body.data(), sizeof(T));
  *rest = body.subspan(sizeof(T));
  return value;
}

// A body that is one structure and nothing else.
template <typename T>
StatusOr<T> DecodeFixed(std::span<const std::byte> body, const char* message) {
  std::span<const std::byte> rest;
  auto value = DecodeHead<T>(body, message, &rest);
  if (value.ok() && !rest.empty()) {
    return Corruption(std::string(message) + " of " + std::to_string(body.size()) +
                      " bytes; it has exactly " + std::to_string(sizeof(T)));
  }
  return value;
}

// For methods and replies without a body.
inline Status RequireEmpty(std::span<const std::byte> body, const char* message) {
  if (body.empty()) return Status::Ok();
  return Corruption(std::string(message) + " of " + std::to_string(body.size()) +
                    " bytes; it has no body");
}

}  // namespace persia::worker

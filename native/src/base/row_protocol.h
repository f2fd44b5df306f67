// Bodies of the parameter server's methods (docs/wire_format.md), for both ends of the connection.
//
// Encoders write only the head of a message: what precedes the signs. Signs and floats follow as
// they lie in the caller's memory, so that nothing large is copied:
//
//   parts.AddOwned(EncodeUpdateHead(key, blocks));
//   parts.AddView(std::as_bytes(signs));
//   parts.AddView(std::as_bytes(gradients));
//   parts.AddView(ArrayPadding(gradients.size_bytes()));
//
// Decoders return views into the bytes they are given, which must start at a multiple of 8 (a
// Buffer does) and outlive the views. They refuse with kCorruption what does not have the form,
// with nothing left over, and with kInvalidArgument what has the form but not a permitted value.
// Nothing is allocated from a length that was not checked against the body.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"

namespace persia {

inline constexpr uint32_t kMaxRowDim = 65536;

// `num_signs` signs of one dim, as it lies on the wire.
struct RowBlockHeader {
  uint32_t dim = 0;
  uint32_t num_signs = 0;
};
static_assert(sizeof(RowBlockHeader) == 8);

// The signs of all blocks, one block after the other.
struct RowBlocksView {
  std::span<const RowBlockHeader> blocks;
  std::span<const uint64_t> signs;
  // Sum of dim x num_signs; at most 2^16 x signs.size(), so it cannot overflow.
  uint64_t num_floats = 0;
};

// Also the embedding worker's: it passes the config on.
struct ConfigureRequest {
  bool replace = false;
  TrainConfig config;
};

struct LookupRowsRequest {
  bool train = false;
  RowBlocksView blocks;
};

// What identifies an update, and the lookup it answers.
struct UpdateRowsKey {
  uint64_t worker_incarnation = 0;
  uint64_t reference = 0;
  uint64_t lookup_incarnation = 0;
  uint64_t lookup_counter = 0;
};
static_assert(sizeof(UpdateRowsKey) == 32);

struct UpdateRowsRequest {
  UpdateRowsKey key;
  RowBlocksView blocks;
  std::span<const float> gradients;  // blocks.num_floats, every one finite
};

struct SetRowsRequest {
  RowBlocksView blocks;
  std::span<const float> rows;  // blocks.num_floats, every one finite
};

// Signs that lookups are about to name; none, to ask whether a server has any use for that.
struct PrefetchRowsRequest {
  std::span<const uint64_t> signs;
};
// 0: no rows have to be read from a file, do not send more.
struct PrefetchRowsReply {
  uint64_t is_wanted = 0;
};
static_assert(sizeof(PrefetchRowsReply) == 8);

struct PingReply {
  uint64_t incarnation = 0;
  uint32_t replica_index = 0;
  uint32_t replica_size = 0;
};
static_assert(sizeof(PingReply) == 16);

// The head of a lookup's reply; the rows follow, padded.
struct LookupRowsReply {
  uint64_t incarnation = 0;
  uint64_t update_counter = 0;
};
static_assert(sizeof(LookupRowsReply) == 16);

struct UpdateRowsReply {
  uint64_t staleness = 0;
  uint64_t num_updated = 0;
  uint64_t num_missing = 0;
};
static_assert(sizeof(UpdateRowsReply) == 24);

// Zero bytes that bring an array of `size_bytes` to the next multiple of 8; the view never dangles.
std::span<const std::byte> ArrayPadding(uint64_t size_bytes);

std::vector<std::byte> EncodeConfigureRequest(const TrainConfig& config, bool replace);
StatusOr<ConfigureRequest> DecodeConfigureRequest(std::span<const std::byte> body);

std::vector<std::byte> EncodeLookupHead(bool train, std::span<const RowBlockHeader> blocks);
std::vector<std::byte> EncodeUpdateHead(const UpdateRowsKey& key,
                                        std::span<const RowBlockHeader> blocks);
std::vector<std::byte> EncodeSetRowsHead(std::span<const RowBlockHeader> blocks);

StatusOr<LookupRowsRequest> DecodeLookupRequest(std::span<const std::byte> body);
StatusOr<UpdateRowsRequest> DecodeUpdateRequest(std::span<const std::byte> body);
StatusOr<SetRowsRequest> DecodeSetRowsRequest(std::span<const std::byte> body);
StatusOr<PrefetchRowsRequest> DecodePrefetchRequest(std::span<const std::byte> body);

StatusOr<PingReply> DecodePingReply(std::span<const std::byte> body);
// `rows` views the body and has exactly `num_floats` elements.
StatusOr<LookupRowsReply> DecodeLookupReply(std::span<const std::byte> body, uint64_t num_floats,
                                            std::span<const float>* rows);
StatusOr<UpdateRowsReply> DecodeUpdateReply(std::span<const std::byte> body);
StatusOr<PrefetchRowsReply> DecodePrefetchReply(std::span<const std::byte> body);

}  // namespace persia

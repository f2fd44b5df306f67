// The plane between embedding workers and parameter servers: its methods and their messages
// (docs/wire_format.md), for both ends of the connection.
//
// Messages are views: a request's signs and floats are sent from the caller's memory, and read in
// the body where they arrived. A decoder refuses a body of another form with kCorruption, and a
// value that is not permitted with kInvalidArgument. To add a method, add its constant to the table
// below, a handler in server/parameter_server.cc, and a call in worker/remote_rows.cc.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/method.h"
#include "base/status.h"
#include "base/train_config.h"

namespace persia {

inline constexpr uint32_t kMaxRowDim = 65536;

// `num_signs` signs of one dim, in memory as on the wire.
struct SignBlock {
  uint32_t dim = 0;
  uint32_t num_signs = 0;
};
static_assert(sizeof(SignBlock) == 8);

// The signs of all blocks, one block after the other. Does not own them.
struct SignBlocks {
  std::span<const SignBlock> blocks;
  std::span<const uint64_t> signs;

  // Of the signs' rows. At most 2^16 x signs.size() in a decoded message: it cannot overflow.
  uint64_t num_floats() const {
    uint64_t n = 0;
    for (const SignBlock& block : blocks) n += uint64_t{block.dim} * block.num_signs;
    return n;
  }
};

// Identifies a batch among all that embedding workers ever hold, and so the update that it ends in.
struct BatchKey {
  uint64_t worker_incarnation = 0;
  uint64_t reference = 0;  // counts from 1; 0: no batch
};
static_assert(sizeof(BatchKey) == 16);

uint64_t DrawIncarnation();

// A server's state at the time of a lookup: its life and how many updates it had applied.
struct LookupStamp {
  uint64_t incarnation = 0;
  uint64_t update_counter = 0;
};
static_assert(sizeof(LookupStamp) == 16);

// Also the embedding worker's: it passes the config on.
struct ConfigureRequest {
  TrainConfig config;
  bool replace = false;

  Segments Encode() &&;
  static StatusOr<ConfigureRequest> Decode(std::span<const std::byte> body);
};

struct LookupRowsRequest {
  bool train = false;
  SignBlocks blocks;

  Segments Encode() &&;
  static StatusOr<LookupRowsRequest> Decode(std::span<const std::byte> body);
};

// A server's answer to a lookup: the rows lie in `storage`.
struct ServerRows {
  LookupStamp stamp;
  std::span<const float> rows;
  Buffer storage;

  Segments Encode() &&;
  static StatusOr<ServerRows> Decode(Buffer body);
};

struct UpdateRowsRequest {
  BatchKey key;
  LookupStamp lookup;  // of the lookup that the gradients belong to
  SignBlocks blocks;
  std::span<const float> gradients;  // blocks.num_floats(), every one finite

  Segments Encode() &&;
  static StatusOr<UpdateRowsRequest> Decode(std::span<const std::byte> body);
};

struct UpdateResult {
  uint64_t staleness = 0;
  uint64_t num_updated = 0;
  uint64_t num_missing = 0;
};
static_assert(sizeof(UpdateResult) == 24);

struct SetRowsRequest {
  SignBlocks blocks;
  std::span<const float> rows;  // blocks.num_floats(), every one finite

  Segments Encode() &&;
  static StatusOr<SetRowsRequest> Decode(std::span<const std::byte> body);
};

// 0: the server reads no rows from a file. Send no more hints.
struct PrefetchRowsReply {
  uint64_t is_wanted = 0;
};
static_assert(sizeof(PrefetchRowsReply) == 8);

// What a server holds, and what it has done since it started: the measure of imbalance among
// servers, whose signs are routed by hash alone.
struct ServerLoad {
  uint64_t num_rows = 0;
  uint64_t memory_bytes = 0;  // of rows and index
  uint64_t num_looked_up_rows = 0;  // missing ones included
  uint64_t num_updated_rows = 0;
};
static_assert(sizeof(ServerLoad) == 32);

// Numbers 1 and 20 were methods of earlier versions.
inline constexpr Method<ConfigureRequest, Empty> kConfigureServer{{16, "ConfigureServer"}};
inline constexpr Method<LookupRowsRequest, ServerRows> kLookupRows{{17, "LookupRows"}};
inline constexpr Method<UpdateRowsRequest, UpdateResult> kUpdateRows{{18, "UpdateRows"}};
inline constexpr Method<SetRowsRequest, Empty> kSetRows{{19, "SetRows"}};
inline constexpr Method<Empty, Empty> kClearRows{{21, "ClearRows"}};
inline constexpr Method<Empty, uint64_t> kCountRows{{22, "CountRows"}};
// Signs that lookups will name soon; none, to ask whether the server has a use for such hints.
inline constexpr Method<std::span<const uint64_t>, PrefetchRowsReply> kPrefetchRows{
    {23, "PrefetchRows"}};
inline constexpr Method<Empty, ServerLoad> kMeasureLoad{{24, "MeasureLoad"}};

}  // namespace persia

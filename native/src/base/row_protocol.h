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

// The store's limit, which a static_assert of the server compares. A decoder needs it so that dim x
// signs cannot overflow 64 bits.
inline constexpr uint32_t kMaxRowDim = 65536;

// `num_signs` signs of one dim, in memory as on the wire.
// Without padding, because it is written and read as an array.
struct SignBlock {
  uint32_t dim = 0;
  uint32_t num_signs = 0;
};
static_assert(sizeof(SignBlock) == 8);

// The signs of all blocks, one block after the other. Does not own them.
// No sign occurs twice: who asks has removed duplicates, and a store may count on it. Two blocks of
// one dim are permitted, and empty ones.
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
  // A worker never gives a reference out twice in its life, and its incarnation tells one life from
  // the next. So a key that is repeated after any number of restarts still means the same batch.
  uint64_t reference = 0;  // counts from 1; 0: no batch
};
static_assert(sizeof(BatchKey) == 16);

// Draws the number that tells one life of a server or worker from the next. Never 0, which stands
// for "none" in messages.
uint64_t DrawIncarnation();

// A server's state at the time of a lookup: its life and how many updates it had applied.
struct LookupStamp {
  // 0: the server was not asked. A lookup of another life of the server dates nothing: rows may
  // have been lost in between.
  uint64_t incarnation = 0;
  uint64_t update_counter = 0;
};
static_assert(sizeof(LookupStamp) == 16);

// Also the embedding worker's: it passes the config on.
// `replace` permits a config that differs from the present one in what rows do not depend on, such
// as a learning rate. Without it a server accepts only the config that it has: workers send theirs
// again to a server that has restarted.
struct ConfigureRequest {
  TrainConfig config;
  // False for the configs that workers repeat by themselves, so that a worker with an older one
  // never undoes a change.
  bool replace = false;

  Segments Encode() &&;
  static StatusOr<ConfigureRequest> Decode(std::span<const std::byte> body);
};

// `train`: missing signs get rows, subject to admission, and the order of eviction changes. Without
// it missing signs read as zeros, and nothing changes.
struct LookupRowsRequest {
  bool train = false;
  SignBlocks blocks;

  Segments Encode() &&;
  static StatusOr<LookupRowsRequest> Decode(std::span<const std::byte> body);
};

// A server's answer to a lookup: the rows lie in `storage`.
// `rows` are those of the request's signs, block after block. A default one stands for a server
// that was not asked.
struct ServerRows {
  LookupStamp stamp;
  std::span<const float> rows;
  Buffer storage;

  Segments Encode() &&;
  static StatusOr<ServerRows> Decode(Buffer body);
};

// Repeated with the same key, it is answered without being applied again. Everything that it views
// is the sender's until the call has ended.
struct UpdateRowsRequest {
  BatchKey key;
  LookupStamp lookup;  // of the lookup that the gradients belong to
  SignBlocks blocks;
  std::span<const float> gradients;  // blocks.num_floats(), every one finite

  Segments Encode() &&;
  static StatusOr<UpdateRowsRequest> Decode(std::span<const std::byte> body);
};

// Updated and missing rows together are the signs of the request, less those whose gradient was not
// finite.
struct UpdateResult {
  // Updates applied between the batch's lookup and its own update, those of all workers; 0 when the
  // server restarted in between.
  uint64_t staleness = 0;
  uint64_t num_updated = 0;
  uint64_t num_missing = 0;
};
static_assert(sizeof(UpdateResult) == 24);

// Writes embeddings from outside, pretrained ones for instance. Their optimizer state becomes that
// of a new row.
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
  // The last two fall back to 0 when the server restarts: compare servers of about the same age.
  uint64_t num_looked_up_rows = 0;  // missing ones included
  uint64_t num_updated_rows = 0;
};
static_assert(sizeof(ServerLoad) == 32);

// What a primary sends to its standby (server/standby_link.h).
enum class ReplicateKind : uint32_t {
  kOperation = 0,  // the body of a request of `method`, which the primary has applied
  kHeartbeat = 1,  // no body
  // The copy of the primary's rows, in this order: its config (none where it has none), any number
  // of chunks of checkpoint blocks, the updates that it recognises, and the end.
  kCopyConfig = 2,
  kCopyRows = 3,
  kCopyUpdates = 4,
  kCopyEnd = 5,
};

// Names both ends by their incarnations: a server that was replaced, or one that believes in
// another standby, is refused.
struct ReplicateRequest {
  uint64_t primary = 0;
  uint64_t standby = 0;
  ReplicateKind kind = ReplicateKind::kOperation;
  uint32_t method = 0;
  uint64_t number = 0;  // of an operation, from 0 without gaps since the standby was attached
  std::span<const std::byte> body;

  Segments Encode() &&;
  static StatusOr<ReplicateRequest> Decode(std::span<const std::byte> body);
};

// Numbers 1 and 20 were methods of earlier versions.
// A number is never used again, and a method never changes its messages without the frame's
// version: servers answer what they do not know with kInvalidArgument.
//
// The third column has the roles that may call a method; `true` behind it: each call is audited.
// Embedding workers pass on what trainers ask of them, and check the trainer themselves.
inline constexpr Method<ConfigureRequest, Empty> kConfigureServer{
    {16, "ConfigureServer", {Role::kWorker, Role::kAdmin}, true}};
inline constexpr Method<LookupRowsRequest, ServerRows> kLookupRows{
    {17, "LookupRows", {Role::kWorker}}};
inline constexpr Method<UpdateRowsRequest, UpdateResult> kUpdateRows{
    {18, "UpdateRows", {Role::kWorker}}};
inline constexpr Method<SetRowsRequest, Empty> kSetRows{
    {19, "SetRows", {Role::kWorker, Role::kAdmin}, true}};
// All rows, of all groups. The config stays.
inline constexpr Method<Empty, Empty> kClearRows{
    {21, "ClearRows", {Role::kWorker, Role::kAdmin}, true}};
inline constexpr Method<Empty, uint64_t> kCountRows{
    {22, "CountRows", {Role::kWorker, Role::kMonitor, Role::kAdmin}}};
// Signs that lookups will name soon; none, to ask whether the server has a use for such hints.
inline constexpr Method<std::span<const uint64_t>, PrefetchRowsReply> kPrefetchRows{
    {23, "PrefetchRows", {Role::kWorker}}};
// Visits each shard in turn, as CountRows does: for a status page, not for each batch.
inline constexpr Method<Empty, ServerLoad> kMeasureLoad{
    {24, "MeasureLoad", {Role::kWorker, Role::kMonitor, Role::kAdmin}}};
// Whole rows, with optimizer state (store/whole_rows.h), for training: the rank replays updates on
// them.
inline constexpr Method<LookupRowsRequest, ServerRows> kLookupWholeRows{
    {26, "LookupWholeRows", {Role::kWorker}}};
// From a primary to its standby alone.
inline constexpr Method<ReplicateRequest, Empty> kReplicate{{25, "Replicate", {Role::kServer}}};

}  // namespace persia

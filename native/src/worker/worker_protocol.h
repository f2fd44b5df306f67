// The plane between NN workers and embedding workers: its methods and their messages
// (docs/wire_format.md), for both ends of the connection.
//
// Embeddings and gradients are megabytes, so neither end copies them as float32: embeddings are
// pooled into the message and used where they arrive, gradients are sent from the caller's rows and
// read in the body. With 16 bits each end converts them once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/row_protocol.h"
#include "worker/types.h"
#include "worker/wire_floats.h"

namespace persia::worker {

// How a batch is looked up, as on the wire. Values are checked by the worker service.
// Plain numbers, because it is copied from the wire: nothing in it may be trusted before the
// service has looked at it.
// The sizes below are asserted because these structs are copied to and from messages: a field more
// would change the protocol silently.
struct LookupOptions {
  uint32_t requires_grad = 0;
  uint32_t wire_dtype = 0;  // a WireDtype: that of the embeddings asked for
  uint32_t slots = 0;       // a SlotMask
  uint32_t form = 0;        // an EmbeddingsForm; of 16 bits a float always kPooled
};
static_assert(sizeof(LookupOptions) == 16);

// The batch was registered by a loader, and is named by its key.
struct LookupReferenceRequest {
  BatchKey key;
  LookupOptions options;
};
static_assert(sizeof(LookupReferenceRequest) == 32);

// The batch comes with the request, for evaluation and inference, or for a rank without loaders.
// The ID features are a view, and begin at a multiple of 8 of the body. `original` is zero, or the
// key under which a worker that has died held the batch.
struct LookupDirectRequest {
  LookupOptions options;
  BatchKey original = {};
  std::span<const std::byte> id_features;

  Segments Encode() &&;
  static StatusOr<LookupDirectRequest> Decode(std::span<const std::byte> body);
};

// Rows that are sent must stay until the call has returned. Slots and shapes are not compared with
// a batch when they are decoded: EmbeddingWorker does that.
struct GradientsRequest {
  BatchKey key;
  // What the loss was multiplied by (AMP). The worker divides by it, so that servers see true
  // gradients.
  float scale = 1.0f;
  WireDtype dtype = WireDtype::kFloat32;  // how they are sent; float32 once decoded
  std::vector<SlotGradient> gradients;  // names and rows are in the decoded bytes, or in `widened`
  std::vector<Buffer> widened = {};     // rows that arrived with 16 bits; empty at the sender

  Segments Encode() &&;
  static StatusOr<GradientsRequest> Decode(std::span<const std::byte> body);
};

// Numbers 40 was a method of earlier versions. A lookup's reply is an embeddings message:
// LayOutEmbeddings() makes it, DecodeEmbeddings reads it. For the third column and `true` see
// base/row_protocol.h.
inline constexpr Method<ConfigureRequest, Empty> kConfigureWorker{
    {32, "ConfigureWorker", {Role::kTrainer, Role::kAdmin}, true}};
inline constexpr Method<LookupReferenceRequest, Buffer> kLookupReference{
    {33, "LookupReference", {Role::kTrainer}}};
// With requires_grad only for trainers: it inserts rows.
inline constexpr Method<LookupDirectRequest, Buffer> kLookupDirect{
    {34, "LookupDirect", {Role::kTrainer, Role::kInference}}};
inline constexpr Method<GradientsRequest, ReturnReport> kReturnGradients{
    {35, "ReturnGradients", {Role::kTrainer}}};
// Idempotent: releasing a batch that has ended is no error.
inline constexpr Method<BatchKey, Empty> kReleaseReference{
    {36, "ReleaseReference", {Role::kTrainer}}};
// Rows per parameter server.
inline constexpr Method<Empty, std::vector<uint64_t>> kCountEmbeddings{
    {37, "CountEmbeddings", {Role::kTrainer, Role::kInference, Role::kMonitor, Role::kAdmin}}};
inline constexpr Method<Empty, Empty> kClearEmbeddings{
    {38, "ClearEmbeddings", {Role::kTrainer, Role::kAdmin}, true}};
// The body of SetRows, with signs of all servers: the worker routes them.
inline constexpr Method<SetRowsRequest, Empty> kSetEmbeddings{
    {39, "SetEmbeddings", {Role::kTrainer, Role::kAdmin}, true}};

}  // namespace persia::worker

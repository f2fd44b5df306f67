// Messages of a rank with consistency="exact": whole rows of chosen signs, and gradients that are
// applied in the rank's order. client/exact_rows.h is their other end.
// Why worker_protocol.h does not suffice: a rank that replays its updates needs
// optimizer state beside each row, must not be sent rows that it holds with newer values, and needs
// its updates applied in its own order, although several are on their way (ADR 54).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/placement.h"
#include "worker/worker_protocol.h"

namespace persia::worker {

// Whole rows for training, of the signs that the rank asks for: it holds the others.
// The views are the sender's memory until the call has returned, or the decoded body.
struct LookupWholeRequest {
  BatchKey key;  // reference 0: the ID features come with the request
  SlotMask slots = 0;
  uint32_t reserved = 0;
  // A bit for each sign number of the batch's plan, which worker and rank make alike.
  // Bits instead of signs: both ends number the signs of a batch in the order of their first
  // appearance, so a number takes a 64th of a sign. Hence both must have one embedding config; the
  // worker compares the number of words with its own plan.
  std::span<const uint64_t> wanted;
  std::span<const std::byte> id_features;

  bool Wants(uint32_t number) const { return (wanted[number / 64] >> number % 64 & 1) != 0; }
  Segments Encode() &&;
  static StatusOr<LookupWholeRequest> Decode(std::span<const std::byte> body);
};

// The rows by server, as the servers sent them: those of a server in the order of sign numbers.
// The worker passes the buffers of its servers on without a copy: whole rows are the largest
// messages of all. A row is the embedding, the optimizer state and, where the optimizer has one,
// the scalar's bits as a float (store/whole_rows.h).
struct WholeRows {
  BatchKey key;
  std::vector<uint64_t> incarnations;        // of each server's rows
  std::vector<std::span<const float>> rows;  // by server, in `storage`
  std::vector<Buffer> storage;
  Placement placement;  // that tells which server each row is of

  Segments Encode() &&;
  static StatusOr<WholeRows> Decode(Buffer body);
};

// `after`: the batch, held by the same worker, whose update is applied first; reference 0: none.
// Order is asked for only among batches of one worker: only it can know when the earlier one has
// been applied. For another worker's batch the rank waits itself, before it sends (ExactRows).
struct OrderedGradientsRequest {
  BatchKey after;
  GradientsRequest gradients;

  Segments Encode() &&;
  static StatusOr<OrderedGradientsRequest> Decode(std::span<const std::byte> body);
};

// Returns that a rank has on their way to a worker. Each may occupy a handler thread until the one
// before it is applied, so a worker has at least as many: the first of them is then never stuck. A
// repetition of one that waits is answered with kUnavailable.
inline constexpr uint32_t kMaxOrderedReturns = 4;

inline constexpr Method<LookupWholeRequest, WholeRows> kLookupWhole{
    {41, "LookupWhole", {Role::kTrainer}}};
inline constexpr Method<OrderedGradientsRequest, ReturnReport> kReturnInOrder{
    {42, "ReturnInOrder", {Role::kTrainer}}};

}  // namespace persia::worker

// Messages of a rank with consistency="exact": whole rows of chosen signs, and gradients that are
// applied in the rank's order. client/exact_rows.h is their other end.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/worker_protocol.h"

namespace persia::worker {

// Whole rows for training, of the signs that the rank asks for: it holds the others.
struct LookupWholeRequest {
  BatchKey key;  // reference 0: the ID features come with the request
  SlotMask slots = 0;
  uint32_t reserved = 0;
  // A bit for each sign number of the batch's plan, which worker and rank make alike.
  std::span<const uint64_t> wanted;
  std::span<const std::byte> id_features;

  bool Wants(uint32_t number) const { return (wanted[number / 64] >> number % 64 & 1) != 0; }
  Segments Encode() &&;
  static StatusOr<LookupWholeRequest> Decode(std::span<const std::byte> body);
};

// The rows by server, as the servers sent them: those of a server in the order of sign numbers.
struct WholeRows {
  BatchKey key;
  std::vector<uint64_t> incarnations;        // by server; 0: not asked
  std::vector<std::span<const float>> rows;  // by server, in `storage`
  std::vector<Buffer> storage;

  Segments Encode() &&;
  static StatusOr<WholeRows> Decode(Buffer body);
};

// `after`: the batch, held by the same worker, whose update is applied first; reference 0: none.
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

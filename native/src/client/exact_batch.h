// A batch in flight of ExactRows, for its two halves: exact_rows.cc has what works on rows,
// exact_returns.cc what orders the updates on their way to the servers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/exact_rows.h"

namespace persia::client {

// Working fields belong to the thread that works on the batch.
struct ExactRows::Batch {
  worker::LookupPlan plan;                         // of one server
  std::vector<uint64_t> wanted;                    // as in LookupWholeRequest
  std::vector<uint32_t> cells;                     // by sign number; kNoCell: not held
  uint64_t number = 0;                             // in the order of lookups
  std::vector<worker::BatchReference> references;  // the last one is of the worker that holds it
  uint64_t update = 0;                             // in the order of updates; 0: not applied
  worker::ReducedGradients sums;
  std::vector<const float*> sum_of;  // by sign number; null: without a gradient

  std::span<const uint64_t> signs() const { return plan.requests[0].signs; }
  bool Wants(uint32_t sign) const { return (wanted[sign / 64] >> sign % 64 & 1) != 0; }
};

}  // namespace persia::client

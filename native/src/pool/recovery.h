// Recovery: a pool as it was at its committed checkpoint.
//
// Every slot tells by itself whether its row is part of that, so extents are read in parallel, each
// once. What was begun after the checkpoint is undone in place: versions made since end at once,
// and those that had ended since live again. Done twice it does the same, so recovery may itself be
// cut short.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "pool/backing.h"
#include "pool/pool_header.h"
#include "pool/row_record.h"
#include "pool/slot_allocator.h"

namespace persia::pool {

struct RecoveredRow {
  uint64_t address;
  RowHead head;
  uint64_t age;  // batches between the version and the checkpoint
};
// Called by several threads at once, with the rows of an extent.
using VisitRows = std::function<void(std::span<const RecoveredRow>)>;

// What is empty before.
struct RecoveredPool {
  SlotAllocator* slots;
  std::vector<uint64_t>* extent_ids;
  uint64_t num_rows = 0;
};
// Durable when it returns.
Status RecoverRows(const PoolHeader& header, ThreadPool* threads, const VisitRows& visit,
                   Backing* backing, RecoveredPool* recovered);

}  // namespace persia::pool

// Recovery: a pool as it was at its committed checkpoint.
//
// A cell's record shows whether its row belongs to that, without any other cell, so extents are
// read in parallel, each once. What was begun after the checkpoint is undone in place: versions
// made since end at once, and those that had ended since live again. Done twice it does the same,
// so recovery may itself be cut short.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "pool/backing.h"
#include "pool/cell_allocator.h"
#include "pool/pool_header.h"
#include "pool/row_record.h"

namespace persia::pool {

struct RecoveredRow {
  uint64_t address;
  RowHead head;
  uint64_t age;  // batches between the version and the checkpoint
};
// Called by several threads at once, with the rows of an extent. The span is borrowed.
using VisitRows = std::function<void(std::span<const RecoveredRow>)>;

// Visits the rows of the header's checkpoint and returns how many there are. Fills *cells and
// *extent_ids, which are empty before, with the free cells and the id of each extent, 0 where it
// has none. What it undid is durable when it returns.
StatusOr<uint64_t> RecoverRows(const PoolHeader& header, ThreadPool* threads,
                               const VisitRows& visit, Backing* backing, CellAllocator* cells,
                               std::vector<uint64_t>* extent_ids);

// Calls visit(address, record) for each cell of the extent; `record` is null where there is none
// that is whole. It returns a Status; the first that is not Ok ends the scan.
template <typename Visit>
Status ScanExtent(const Backing& backing, const PoolHeader& pool, uint64_t extent,
                  const ExtentHeader& header, Visit visit) {
  const uint32_t cell_bytes = header.cell_bytes;
  constexpr uint64_t kChunkBytes = 256 << 10;  // stays in the processor's cache
  const uint64_t chunk = std::max<uint64_t>(1, kChunkBytes / cell_bytes) * cell_bytes;
  std::vector<std::byte> bytes(chunk);
  const uint64_t end = CellsEnd(extent, pool.extent_bytes, cell_bytes);
  for (uint64_t begin = FirstCell(extent); begin < end; begin += chunk) {
    const auto cells = std::span(bytes).first(std::min(chunk, end - begin));
    PERSIA_RETURN_IF_ERROR(backing.Read(begin, cells));
    for (uint64_t place = 0; place < cells.size(); place += cell_bytes) {
      const uint64_t address = begin + place;
      RowRecord record;
      const bool is_whole =
          DecodeRecord(cells.subspan(place, cell_bytes), RecordSeed(header.id, address), &record);
      PERSIA_RETURN_IF_ERROR(visit(address, is_whole ? &record : nullptr));
    }
  }
  return Status::Ok();
}

inline uint64_t NumExtents(const Backing& backing, const PoolHeader& pool) {
  return (backing.size() - PoolHeader::kBytes) / pool.extent_bytes;
}
inline uint64_t ExtentOffset(const PoolHeader& pool, uint64_t number) {
  return PoolHeader::kBytes + number * pool.extent_bytes;
}

}  // namespace persia::pool

#include "pool/recovery.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace persia::pool {
namespace {

// What a thread finds in an extent; put together by one thread afterwards, in order.
struct RecoveredExtent {
  Status status;
  std::optional<ExtentHeader> header;
  std::vector<uint64_t> free;
  uint64_t num_rows = 0;
};

// 8 bytes on their own, which no failure tears (row_record.h).
Status SetEnd(uint64_t address, uint64_t end, Backing* backing) {
  return backing->Write(address + offsetof(RowRecord, end), std::as_bytes(std::span(&end, 1)));
}

// Reads all cells of the extent. The number of versions that live is checked by the caller against
// the header: a damaged record looks like a free cell.
Status RecoverExtent(const PoolHeader& header, uint64_t offset, const VisitRows& visit,
                     Backing* backing, RecoveredExtent* extent) {
  PERSIA_ASSIGN_OR_RETURN(extent->header, ReadExtentHeader(header.filling_id, offset, *backing));
  if (!extent->header) return Status::Ok();
  std::vector<RecoveredRow> rows;
  PERSIA_RETURN_IF_ERROR(ScanExtent(
      *backing, header, offset, *extent->header, [&](uint64_t address, const RowRecord* record) {
        if (record != nullptr && record->IsAliveAt(header.committed)) {
          rows.push_back({address, record->head, header.committed - record->head.version});
          if (!record->HasEnded()) return Status::Ok();
          // It ended after the checkpoint, so it lives again.
          return SetEnd(address, record->EndAt(RowRecord::kNever), backing);
        }
        extent->free.push_back(address);
        // A version after the checkpoint would seem to live at a later one: it gets an end that no
        // checkpoint has.
        const bool is_undone = record != nullptr && record->head.version > header.committed;
        return is_undone && record->end != 0 ? SetEnd(address, 0, backing) : Status::Ok();
      }));
  extent->num_rows = rows.size();
  if (!rows.empty()) visit(rows);
  return Status::Ok();
}

}  // namespace

StatusOr<uint64_t> RecoverRows(const PoolHeader& header, ThreadPool* threads,
                               const VisitRows& visit, Backing* backing, CellAllocator* cells,
                               std::vector<uint64_t>* extent_ids) {
  std::vector<RecoveredExtent> extents(NumExtents(*backing, header));
  threads->For(extents.size(), [&](size_t i) {
    extents[i].status = RecoverExtent(header, ExtentOffset(header, i), visit, backing, &extents[i]);
    backing->Drain();  // of what this thread wrote
  });
  uint64_t num_rows = 0;
  for (const RecoveredExtent& extent : extents) {
    PERSIA_RETURN_IF_ERROR(extent.status);
    num_rows += extent.num_rows;
    extent_ids->push_back(extent.header ? extent.header->id : 0);
    if (extent.header) {
      cells->AddExtent(extent.header->cell_bytes, extent.free);
    } else {
      cells->AddExtent();
    }
  }
  PERSIA_RETURN_IF_ERROR(backing->Sync());
  return num_rows;
}

}  // namespace persia::pool

#include "pool/recovery.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace persia::pool {
namespace {

struct Extent {
  Status status;
  std::optional<ExtentHeader> header;
  std::vector<uint64_t> free;
  uint64_t num_rows = 0;
};

Status SetEnd(uint64_t address, uint64_t end, Backing* backing) {
  return backing->Write(address + offsetof(RowRecord, end), std::as_bytes(std::span(&end, 1)));
}

Status RecoverExtent(const PoolHeader& header, uint64_t offset, const VisitRows& visit,
                     Backing* backing, Extent* extent) {
  auto extent_header = ReadExtentHeader(header.filling_id, offset, *backing);
  PERSIA_RETURN_IF_ERROR(extent_header.status());
  extent->header = *extent_header;
  if (!extent->header) return Status::Ok();
  std::vector<RecoveredRow> rows;
  PERSIA_RETURN_IF_ERROR(ScanExtent(
      *backing, header, offset, *extent->header, [&](uint64_t address, const RowRecord* record) {
        if (record != nullptr && record->IsAliveAt(header.committed)) {
          rows.push_back({address, record->head, header.committed - record->head.version});
          if (!record->HasEnded()) return Status::Ok();
          return SetEnd(address, record->EndAt(RowRecord::kNever), backing);
        }
        extent->free.push_back(address);
        const bool is_undone = record != nullptr && record->head.version > header.committed;
        return is_undone && record->end != 0 ? SetEnd(address, 0, backing) : Status::Ok();
      }));
  extent->num_rows = rows.size();
  if (!rows.empty()) visit(rows);
  return Status::Ok();
}

}  // namespace

Status RecoverRows(const PoolHeader& header, ThreadPool* threads, const VisitRows& visit,
                   Backing* backing, RecoveredPool* recovered) {
  std::vector<Extent> extents(NumExtents(*backing, header));
  threads->For(extents.size(), [&](size_t i) {
    extents[i].status = RecoverExtent(header, ExtentOffset(header, i), visit, backing, &extents[i]);
    backing->Drain();
  });
  for (const Extent& extent : extents) {
    PERSIA_RETURN_IF_ERROR(extent.status);
    recovered->num_rows += extent.num_rows;
    recovered->extent_ids->push_back(extent.header ? extent.header->id : 0);
    if (extent.header) {
      recovered->slots->AddExtent(extent.header->slot_bytes, extent.free);
    } else {
      recovered->slots->AddExtent();
    }
  }
  return backing->Sync();
}

}  // namespace persia::pool

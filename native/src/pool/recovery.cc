#include "pool/recovery.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "pool/scan.h"

namespace persia::pool {
namespace {

struct Extent {
  Status status;
  std::optional<uint32_t> slot_bytes;
  std::vector<uint64_t> free;
  uint64_t num_rows = 0;
};

Status SetEnd(uint64_t address, uint64_t end, Backing* backing) {
  return backing->Write(address + offsetof(RowRecord, end), std::as_bytes(std::span(&end, 1)));
}

// It was being taken into use: rows may have got into it of which no checkpoint knows, and would be
// taken for later ones.
Status Erase(uint64_t extent, uint64_t extent_bytes, Backing* backing) {
  const std::vector<std::byte> zeros(std::min<uint64_t>(extent_bytes, 1 << 20));
  for (uint64_t place = 0; place < extent_bytes; place += zeros.size()) {
    const uint64_t count = std::min<uint64_t>(zeros.size(), extent_bytes - place);
    PERSIA_RETURN_IF_ERROR(backing->Write(extent + place, std::span(zeros).first(count)));
  }
  return Status::Ok();
}

Status RecoverExtent(const PoolHeader& header, uint64_t offset, const VisitRows& visit,
                     Backing* backing, Extent* extent) {
  auto slot_bytes = ReadExtentHeader(header.pool_id, offset, *backing);
  PERSIA_RETURN_IF_ERROR(slot_bytes.status());
  extent->slot_bytes = *slot_bytes;
  if (!extent->slot_bytes) return Erase(offset, header.extent_bytes, backing);
  std::vector<RecoveredRow> rows;
  PERSIA_RETURN_IF_ERROR(ScanExtent(
      *backing, header, offset, **slot_bytes, [&](uint64_t address, const RowRecord* record) {
        if (record != nullptr && record->IsAliveAt(header.committed)) {
          rows.push_back({address, record->head});
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
                   Backing* backing, SlotAllocator* slots, uint64_t* num_rows) {
  std::vector<Extent> extents(NumExtents(*backing, header));
  threads->For(extents.size(), [&](size_t i) {
    extents[i].status = RecoverExtent(header, ExtentOffset(header, i), visit, backing, &extents[i]);
    backing->Drain();
  });
  *num_rows = 0;
  for (const Extent& extent : extents) {
    PERSIA_RETURN_IF_ERROR(extent.status);
    *num_rows += extent.num_rows;
    if (extent.slot_bytes) {
      slots->AddExtent(*extent.slot_bytes, extent.free);
    } else {
      slots->AddExtent();
    }
  }
  return backing->Sync();
}

}  // namespace persia::pool

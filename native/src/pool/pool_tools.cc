#include "pool/pool_tools.h"

#include <memory>
#include <unordered_set>

#include "pool/pool_file.h"
#include "pool/recovery.h"

namespace persia::pool {
namespace {

PoolInfo InfoOf(const PoolHeader& header, const Backing& backing) {
  return {.pool_id = header.pool_id,
          .committed = header.committed,
          .num_rows = header.num_rows,
          .file_bytes = backing.size(),
          .size_bytes = header.size_bytes,
          .extent_bytes = header.extent_bytes,
          .schema = header.schema};
}

}  // namespace

StatusOr<PoolInfo> InspectPool(const std::string& directory) {
  auto file = PoolFile::Open(directory, PoolFile::Access::kReadOnly, /*syncs=*/false);
  PERSIA_RETURN_IF_ERROR(file.status());
  auto header = ReadHeader(**file);
  PERSIA_RETURN_IF_ERROR(header.status());
  return InfoOf(*header, **file);
}

StatusOr<PoolReport> CheckPool(const std::string& directory) {
  auto file = PoolFile::Open(directory, PoolFile::Access::kExclusive, /*syncs=*/false);
  PERSIA_RETURN_IF_ERROR(file.status());
  auto header = ReadHeader(**file);
  PERSIA_RETURN_IF_ERROR(header.status());
  PoolReport report{.info = InfoOf(*header, **file)};
  std::unordered_set<uint64_t> signs;
  for (uint64_t i = 0; i < NumExtents(**file, *header); ++i) {
    const uint64_t extent = ExtentOffset(*header, i);
    auto extent_header = ReadExtentHeader(header->filling_id, extent, **file);
    PERSIA_RETURN_IF_ERROR(extent_header.status());
    if (!*extent_header) {
      ++report.num_unassigned_extents;
      continue;
    }
    PERSIA_RETURN_IF_ERROR(ScanExtent(
        **file, *header, extent, **extent_header, [&](uint64_t, const RowRecord* record) {
          if (record == nullptr) {
            ++report.num_free;
          } else if (!record->IsAliveAt(header->committed)) {
            ++report.num_ended;
          } else {
            ++report.num_living;
            report.num_repeated += !signs.insert(record->head.sign).second;
          }
          return Status::Ok();
        }));
  }
  return report;
}

Status GrowPool(const std::string& directory, uint64_t size_bytes) {
  auto file = PoolFile::Open(directory, PoolFile::Access::kExclusive, /*syncs=*/true);
  PERSIA_RETURN_IF_ERROR(file.status());
  auto header = ReadHeader(**file);
  PERSIA_RETURN_IF_ERROR(header.status());
  if (size_bytes < header->size_bytes) {
    return InvalidArgument("size_bytes is " + std::to_string(size_bytes) +
                           ", and the pool was made with " + std::to_string(header->size_bytes) +
                           "; pools only grow");
  }
  header->size_bytes = size_bytes;
  PERSIA_RETURN_IF_ERROR(WriteHeader(&*header, file->get()));
  return (*file)->Sync();
}

Status CommitPool(const std::string& directory, const PreparedCheckpoint& checkpoint) {
  auto file = PoolFile::Open(directory, PoolFile::Access::kExclusive, /*syncs=*/true);
  PERSIA_RETURN_IF_ERROR(file.status());
  auto header = ReadHeader(**file);
  PERSIA_RETURN_IF_ERROR(header.status());
  if (header->pool_id != checkpoint.pool_id || header->sequence != checkpoint.sequence) {
    return FailedPrecondition("the pool in " + directory +
                              " was changed or opened since it prepared the checkpoint of batch " +
                              std::to_string(checkpoint.batch) + ", which is undone");
  }
  header->committed = checkpoint.batch;
  header->num_rows = checkpoint.num_rows;
  PERSIA_RETURN_IF_ERROR(WriteHeader(&*header, file->get()));
  return (*file)->Sync();
}

}  // namespace persia::pool

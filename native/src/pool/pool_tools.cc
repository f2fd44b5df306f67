#include "pool/pool_tools.h"

#include <memory>
#include <unordered_set>
#include <utility>

#include "pool/pool_file.h"
#include "pool/recovery.h"

namespace persia::pool {
namespace {

struct OpenFile {
  std::unique_ptr<PoolFile> file;
  PoolHeader header;
  PoolInfo info() const { return {header, file->size()}; }
};

StatusOr<OpenFile> Open(const std::string& directory, PoolFile::Access access) {
  PERSIA_ASSIGN_OR_RETURN(auto file, PoolFile::Open(directory, access, /*syncs=*/true));
  PERSIA_ASSIGN_OR_RETURN(PoolHeader header, ReadHeader(*file));
  return OpenFile{std::move(file), std::move(header)};
}

Status Store(OpenFile* pool) {
  PERSIA_RETURN_IF_ERROR(WriteHeader(&pool->header, pool->file.get()));
  return pool->file->Sync();
}

}  // namespace

// Without a lock the file may grow meanwhile: its size is that of some moment.
StatusOr<PoolInfo> InspectPool(const std::string& directory) {
  PERSIA_ASSIGN_OR_RETURN(const OpenFile pool, Open(directory, PoolFile::Access::kReadOnly));
  return pool.info();
}

// As recovery reads it, extent by extent, but undoing nothing: the pool can be checked before it is
// opened.
StatusOr<PoolReport> CheckPool(const std::string& directory) {
  PERSIA_ASSIGN_OR_RETURN(const OpenFile pool, Open(directory, PoolFile::Access::kExclusive));
  const auto& [file, header] = pool;
  PoolReport report{.info = pool.info()};
  std::unordered_set<uint64_t> signs;
  for (uint64_t i = 0; i < NumExtents(*file, header); ++i) {
    const uint64_t extent = ExtentOffset(header, i);
    PERSIA_ASSIGN_OR_RETURN(const auto extent_header,
                            ReadExtentHeader(header.filling_id, extent, *file));
    if (!extent_header) {
      ++report.num_unassigned_extents;
      continue;
    }
    const uint64_t committed = header.committed;
    PERSIA_RETURN_IF_ERROR(
        ScanExtent(*file, header, extent, *extent_header, [&](uint64_t, const RowRecord* record) {
          if (record == nullptr) {
            ++report.num_free;
          } else if (!record->IsAliveAt(committed)) {
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
  PERSIA_ASSIGN_OR_RETURN(OpenFile pool, Open(directory, PoolFile::Access::kExclusive));
  PERSIA_RETURN_IF_ERROR(RaiseSize(size_bytes, &pool.header));
  return Store(&pool);
}

// The sequence number tells of every write of the header since, also of that by Open().
Status CommitPool(const std::string& directory, const PreparedCheckpoint& checkpoint) {
  PERSIA_ASSIGN_OR_RETURN(OpenFile pool, Open(directory, PoolFile::Access::kExclusive));
  PoolHeader& header = pool.header;
  if (header.pool_id != checkpoint.pool_id || header.sequence != checkpoint.sequence) {
    return FailedPrecondition("the pool in ", directory,
                              " was changed or opened since it prepared the checkpoint of batch ",
                              checkpoint.batch, ", which is undone");
  }
  header.committed = checkpoint.batch;
  header.num_rows = checkpoint.num_rows;
  return Store(&pool);
}

}  // namespace persia::pool

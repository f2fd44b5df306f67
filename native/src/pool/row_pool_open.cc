// The part of RowPool that makes and opens pools: Create, Open, Format and Recover.
#include <algorithm>
#include <string>
#include <utility>

#include "pool/pmem_backing.h"
#include "pool/pool_file.h"
#include "pool/row_pool.h"

namespace persia::pool {
namespace {

// A page, so that extents and the pages of files and mappings coincide.
constexpr uint64_t kMinExtentBytes = 4096;

Status CheckSchema(const std::string& schema) {
  if (schema.size() <= PoolHeader::kMaxSchemaBytes) return Status::Ok();
  return InvalidArgument("the description of a pool's rows has ", schema.size(),
                         " bytes; a pool remembers at most ", PoolHeader::kMaxSchemaBytes);
}

// Of a new pool.
Status CheckOptions(const PoolOptions& options) {
  if (options.extent_bytes < kMinExtentBytes || options.extent_bytes % kMinExtentBytes != 0) {
    return InvalidArgument("extent_bytes is ", options.extent_bytes, "; give a multiple of ",
                           kMinExtentBytes);
  }
  const uint64_t least = PoolHeader::kBytes + options.extent_bytes;
  if (options.size_bytes < least) {
    return InvalidArgument("size_bytes is ", options.size_bytes,
                           ", too small for a pool; give at least ", least);
  }
  return CheckSchema(options.schema);
}

// A pool whose user did not say what its rows are takes the first schema that it is opened with.
Status MergeSchema(const std::string& schema, PoolHeader* header) {
  if (schema.empty() || schema == header->schema) return Status::Ok();
  if (!header->schema.empty()) {
    return FailedPrecondition("the pool's rows are of another schema: it has ", header->schema,
                              ", and ", schema,
                              " is wanted; export it to a checkpoint, or give another path");
  }
  PERSIA_RETURN_IF_ERROR(CheckSchema(schema));
  header->schema = schema;
  return Status::Ok();
}

StatusOr<std::unique_ptr<Backing>> MakeBacking(PoolKind kind, std::unique_ptr<PoolFile> file,
                                               uint64_t max_bytes) {
  if (kind == PoolKind::kPmem) return MapPmem(std::move(file), max_bytes);
  return std::unique_ptr<Backing>(std::move(file));
}

}  // namespace

RowPool::RowPool(std::unique_ptr<Backing> backing, const PoolOptions& options, PoolHeader header)
    : backing_(std::move(backing)),
      max_pending_(options.max_pending),
      pool_id_(header.pool_id),
      filling_id_(header.filling_id),
      extent_bytes_(header.extent_bytes),
      max_bytes_(header.size_bytes),
      cells_(PoolHeader::kBytes, header.extent_bytes),
      committed_(header.committed),
      last_checkpoint_(header.committed),
      newest_(header.committed),
      extent_ids_(std::make_unique<std::atomic<uint64_t>[]>(
          std::max(max_bytes_, backing_->size()) / extent_bytes_ + 1)),
      header_(std::move(header)) {}

// Formatted before it gets its name: a tier file that has its name is complete.
StatusOr<std::unique_ptr<RowPool>> RowPool::Create(const std::string& directory,
                                                   const PoolOptions& options) {
  PERSIA_RETURN_IF_ERROR(CheckOptions(options));
  PERSIA_ASSIGN_OR_RETURN(auto created, PoolFile::Create(directory, options.syncs));
  PoolFile& file = *created;  // the backing owns it from now on
  PERSIA_ASSIGN_OR_RETURN(auto backing,
                          MakeBacking(options.kind, std::move(created), options.size_bytes));
  PERSIA_ASSIGN_OR_RETURN(auto pool, Format(std::move(backing), options));
  PERSIA_RETURN_IF_ERROR(file.Publish());
  file.ExpectRandomReads();
  return pool;
}

// A mapping must reach as far as the pool may ever grow: rows are read without a lock meanwhile.
StatusOr<std::unique_ptr<RowPool>> RowPool::Open(const std::string& directory,
                                                 const PoolOptions& options,
                                                 const VisitRows& visit) {
  PERSIA_ASSIGN_OR_RETURN(auto file,
                          PoolFile::Open(directory, PoolFile::Access::kExclusive, options.syncs));
  PERSIA_ASSIGN_OR_RETURN(const PoolHeader header, ReadHeader(*file));
  const uint64_t max_bytes = std::max(
      {options.size_bytes, header.size_bytes, file->size()});  // what is there is mapped too
  PERSIA_ASSIGN_OR_RETURN(auto backing, MakeBacking(options.kind, std::move(file), max_bytes));
  return Recover(std::move(backing), options, visit);
}

StatusOr<std::unique_ptr<RowPool>> RowPool::Format(std::unique_ptr<Backing> backing,
                                                   const PoolOptions& options) {
  PERSIA_RETURN_IF_ERROR(CheckOptions(options));
  PoolHeader header;
  header.pool_id = DrawId();
  header.filling_id = DrawId();
  header.extent_bytes = options.extent_bytes;
  header.size_bytes = options.size_bytes;
  header.schema = options.schema;
  PERSIA_RETURN_IF_ERROR(backing->Grow(PoolHeader::kBytes));
  PERSIA_RETURN_IF_ERROR(WriteHeader(&header, backing.get()));
  PERSIA_RETURN_IF_ERROR(backing->Sync());
  return std::unique_ptr<RowPool>(new RowPool(std::move(backing), options, std::move(header)));
}

// The header is written even where it did not change: its new sequence number voids checkpoints
// that were prepared before, whose rows recovery has undone.
StatusOr<std::unique_ptr<RowPool>> RowPool::Recover(std::unique_ptr<Backing> backing,
                                                    const PoolOptions& options,
                                                    const VisitRows& visit) {
  PERSIA_ASSIGN_OR_RETURN(PoolHeader header, ReadHeader(*backing));
  PERSIA_RETURN_IF_ERROR(MergeSchema(options.schema, &header));
  if (options.size_bytes != 0) PERSIA_RETURN_IF_ERROR(RaiseSize(options.size_bytes, &header));
  std::unique_ptr<RowPool> pool(new RowPool(std::move(backing), options, header));
  ThreadPool threads(std::max(1u, options.num_threads));
  std::vector<uint64_t> extent_ids;
  PERSIA_ASSIGN_OR_RETURN(
      const uint64_t num_rows,
      RecoverRows(header, &threads, visit, pool->backing_.get(), &pool->cells_, &extent_ids));
  std::copy(extent_ids.begin(), extent_ids.end(), pool->extent_ids_.get());
  if (num_rows != header.num_rows) {
    return Corruption("the pool had ", header.num_rows, " rows at its checkpoint of batch ",
                      header.committed, ", and ", num_rows,
                      " are there; its file was damaged: remove it and load a checkpoint");
  }
  PERSIA_RETURN_IF_ERROR(pool->WriteHeaderDurably(std::move(header)));
  pool->backing_->ExpectRandomReads();
  return pool;
}

}  // namespace persia::pool

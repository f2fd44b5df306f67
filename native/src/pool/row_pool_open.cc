// The part of RowPool that makes and opens pools: Create, Open, Format, Recover and SetSchema.
#include <algorithm>
#include <string>
#include <utility>

#include "pool/pmem_backing.h"
#include "pool/pool_file.h"
#include "pool/row_pool.h"

namespace persia::pool {
namespace {

constexpr uint64_t kMinExtentBytes = 4096;

Status CheckSizes(const PoolOptions& options) {
  if (options.extent_bytes < kMinExtentBytes || options.extent_bytes % kMinExtentBytes != 0) {
    return InvalidArgument("extent_bytes is " + std::to_string(options.extent_bytes) +
                           "; give a multiple of " + std::to_string(kMinExtentBytes));
  }
  const uint64_t least = PoolHeader::kBytes + options.extent_bytes;
  if (options.size_bytes < least) {
    return InvalidArgument("size_bytes is " + std::to_string(options.size_bytes) +
                           ", too small for a pool; give at least " + std::to_string(least));
  }
  return Status::Ok();
}

Status CheckSchema(const std::string& schema) {
  if (schema.size() <= PoolHeader::kMaxSchemaBytes) return Status::Ok();
  return InvalidArgument("the description of a pool's rows has " + std::to_string(schema.size()) +
                         " bytes; a pool remembers at most " +
                         std::to_string(PoolHeader::kMaxSchemaBytes));
}

Status MergeSchema(const std::string& schema, PoolHeader* header) {
  if (schema.empty() || schema == header->schema) return Status::Ok();
  if (!header->schema.empty()) {
    return FailedPrecondition("the pool's rows are of another schema: it has " + header->schema +
                              ", and " + schema +
                              " is wanted; export it to a checkpoint, or give another path");
  }
  PERSIA_RETURN_IF_ERROR(CheckSchema(schema));
  header->schema = schema;
  return Status::Ok();
}

Status MergeSize(uint64_t size_bytes, PoolHeader* header) {
  if (size_bytes != 0 && size_bytes < header->size_bytes) {
    return InvalidArgument("size_bytes is " + std::to_string(size_bytes) +
                           ", and the pool was made with " + std::to_string(header->size_bytes) +
                           "; pools only grow");
  }
  header->size_bytes = std::max(size_bytes, header->size_bytes);
  return Status::Ok();
}

PoolHeader NewHeader(const PoolOptions& options) {
  return {.pool_id = DrawId(),
          .filling_id = DrawId(),
          .extent_bytes = options.extent_bytes,
          .size_bytes = options.size_bytes,
          .schema = options.schema};
}

Status FormatBacking(PoolHeader* header, Backing* backing) {
  PERSIA_RETURN_IF_ERROR(backing->Grow(PoolHeader::kBytes));
  PERSIA_RETURN_IF_ERROR(WriteHeader(header, backing));
  return backing->Sync();
}

StatusOr<std::unique_ptr<Backing>> BackingOf(PoolKind kind, std::unique_ptr<PoolFile> file,
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
      slots_(PoolHeader::kBytes, header.extent_bytes),
      committed_(header.committed),
      newest_(header.committed),
      extent_ids_(std::make_unique<std::atomic<uint64_t>[]>(
          std::max(max_bytes_, backing_->size()) / extent_bytes_ + 1)),
      header_(std::move(header)) {}

StatusOr<std::unique_ptr<RowPool>> RowPool::Create(const std::string& directory,
                                                   const PoolOptions& options) {
  PERSIA_RETURN_IF_ERROR(CheckSizes(options));
  PERSIA_RETURN_IF_ERROR(CheckSchema(options.schema));
  auto file = PoolFile::Create(directory, options.syncs);
  PERSIA_RETURN_IF_ERROR(file.status());
  PoolHeader header = NewHeader(options);
  PERSIA_RETURN_IF_ERROR(FormatBacking(&header, file->get()));
  PoolFile* const created = file->get();
  auto backing = BackingOf(options.kind, std::move(*file), header.size_bytes);
  PERSIA_RETURN_IF_ERROR(backing.status());
  PERSIA_RETURN_IF_ERROR(created->Publish());
  created->ExpectRandomReads();
  return std::unique_ptr<RowPool>(new RowPool(std::move(*backing), options, std::move(header)));
}

StatusOr<std::unique_ptr<RowPool>> RowPool::Open(const std::string& directory,
                                                 const PoolOptions& options,
                                                 const VisitRows& visit) {
  auto file = PoolFile::Open(directory, PoolFile::Access::kExclusive, options.syncs);
  PERSIA_RETURN_IF_ERROR(file.status());
  auto header = ReadHeader(**file);
  PERSIA_RETURN_IF_ERROR(header.status());
  const uint64_t max_bytes = std::max(
      {options.size_bytes, header->size_bytes, (*file)->size()});  // what is there is mapped too
  auto backing = BackingOf(options.kind, std::move(*file), max_bytes);
  PERSIA_RETURN_IF_ERROR(backing.status());
  return Recover(std::move(*backing), options, visit);
}

StatusOr<std::unique_ptr<RowPool>> RowPool::Format(std::unique_ptr<Backing> backing,
                                                   const PoolOptions& options) {
  PERSIA_RETURN_IF_ERROR(CheckSizes(options));
  PERSIA_RETURN_IF_ERROR(CheckSchema(options.schema));
  PoolHeader header = NewHeader(options);
  PERSIA_RETURN_IF_ERROR(FormatBacking(&header, backing.get()));
  return std::unique_ptr<RowPool>(new RowPool(std::move(backing), options, std::move(header)));
}

StatusOr<std::unique_ptr<RowPool>> RowPool::Recover(std::unique_ptr<Backing> backing,
                                                    const PoolOptions& options,
                                                    const VisitRows& visit) {
  auto header = ReadHeader(*backing);
  PERSIA_RETURN_IF_ERROR(header.status());
  PERSIA_RETURN_IF_ERROR(MergeSchema(options.schema, &*header));
  PERSIA_RETURN_IF_ERROR(MergeSize(options.size_bytes, &*header));
  std::unique_ptr<RowPool> pool(new RowPool(std::move(backing), options, *header));
  ThreadPool threads(std::max(1u, options.num_threads));
  std::vector<uint64_t> extent_ids;
  RecoveredPool recovered{.slots = &pool->slots_, .extent_ids = &extent_ids};
  PERSIA_RETURN_IF_ERROR(RecoverRows(*header, &threads, visit, pool->backing_.get(), &recovered));
  std::copy(extent_ids.begin(), extent_ids.end(), pool->extent_ids_.get());
  const uint64_t num_rows = recovered.num_rows;
  if (num_rows != header->num_rows) {
    return Corruption("the pool had " + std::to_string(header->num_rows) +
                      " rows at its checkpoint of batch " + std::to_string(header->committed) +
                      ", and " + std::to_string(num_rows) +
                      " are there; its file was damaged: remove it and load a checkpoint");
  }
  PERSIA_RETURN_IF_ERROR(pool->WriteHeaderDurably(std::move(*header)));
  pool->backing_->ExpectRandomReads();
  return pool;
}

Status RowPool::SetSchema(const std::string& schema) {
  std::lock_guard lock(header_mutex_);
  if (schema == header_.schema) return Status::Ok();
  PoolHeader header = header_;
  PERSIA_RETURN_IF_ERROR(MergeSchema(schema, &header));
  return WriteHeaderDurably(std::move(header));
}

}  // namespace persia::pool

#include "checkpoint/snapshot.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace persia::checkpoint {
namespace {

constexpr uint32_t kMaxParts = 65536;

}  // namespace

SnapshotPart::SnapshotPart(Snapshot* snapshot, const FileHeader& header, bool with_state,
                           size_t max_gathered_bytes)
    : snapshot_(*snapshot),
      number_(header.part),
      bytes_(EncodeHeader(header)),
      writer_(header.config.value_or(TrainConfig()), with_state, max_gathered_bytes, bytes_.size(),
              &bytes_) {}

Status SnapshotPart::Read(size_t max_bytes, const std::function<std::byte*(size_t)>& allocate) {
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = Produce(max_bytes);
  PERSIA_RETURN_IF_ERROR(status_);
  const size_t count = std::min(max_bytes, bytes_.size() - position_);
  if (count == 0) return Status::Ok();
  std::memcpy(allocate(count), bytes_.data() + position_, count);
  position_ += count;
  num_bytes_ += count;
  return Status::Ok();
}

// What was read is erased only here, so that a part costs a copy of its bytes and no more calls.
Status SnapshotPart::Produce(size_t num_bytes) {
  bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(position_));
  position_ = 0;
  while (bytes_.size() < num_bytes && !is_complete_) {
    PERSIA_RETURN_IF_ERROR(has_all_rows_ ? Finish() : ProduceRows());
  }
  return Status::Ok();
}

// Saved rows come with the batch that was read after they were saved, in any order: blocks are
// sorted by virtual shard, not by row.
Status SnapshotPart::ProduceRows() {
  PERSIA_ASSIGN_OR_RETURN(const bool has_more, snapshot_.feed_->Next(number_, &batch_));
  has_all_rows_ = !has_more;
  PERSIA_RETURN_IF_ERROR(Write(batch_.read));
  for (const store::RowRecords& rows : batch_.saved) PERSIA_RETURN_IF_ERROR(Write(rows));
  num_rows_ = writer_.num_rows();
  return Status::Ok();
}

Status SnapshotPart::Write(const store::RowRecords& rows) {
  Status status;
  rows.ForEach([&](const store::RowHead& head, const float* values) {
    if (status.ok()) status = writer_.Add(head, values);
    // Across calls: rows from a pool come in small numbers.
    if (++num_since_throttle_ < DumpThrottle::kRowsAtATime) return;
    num_since_throttle_ = 0;
    snapshot_.throttle_->Throttle();
  });
  return status;
}

// One virtual shard of what is gathered a call, then the footer: a reader of few bytes waits no
// longer for the end than for the rest.
Status SnapshotPart::Finish() {
  snapshot_.throttle_->Throttle();
  PERSIA_ASSIGN_OR_RETURN(const bool has_flushed, writer_.FlushSome());
  num_rows_ = writer_.num_rows();
  if (has_flushed) return Status::Ok();
  PERSIA_RETURN_IF_ERROR(snapshot_.CheckEnd(writer_.num_rows()));
  const auto footer = EncodeFooter(writer_.blocks());
  const auto trailer = EncodeTrailer({writer_.offset(), footer.size()}, writer_.num_rows());
  bytes_.insert(bytes_.end(), footer.begin(), footer.end());
  bytes_.insert(bytes_.end(), trailer.begin(), trailer.end());
  is_complete_ = true;
  return Status::Ok();
}

// In this order: writers that sleep or wait for rows return first, so that none is left in the
// store.
void Snapshot::Close() {
  throttle_->Stop();
  feed_->Stop();
  rows_->End();
}

Status Snapshot::CheckOptions(const Options& options) {
  if (options.num_parts > 0 && options.num_parts <= kMaxParts) return Status::Ok();
  return InvalidArgument("num_parts is ", options.num_parts, "; give 1 to ", kMaxParts);
}

StatusOr<std::unique_ptr<Snapshot>> Snapshot::Begin(store::EmbeddingStore& store,
                                                    const Options& options) {
  PERSIA_RETURN_IF_ERROR(CheckOptions(options));
  PERSIA_ASSIGN_OR_RETURN(auto rows, store::StoreSnapshot::Begin(store, options.rows));
  return Of(std::move(rows), options);
}

StatusOr<std::unique_ptr<Snapshot>> Snapshot::TakeChanges(store::EmbeddingStore& store,
                                                          const Options& options) {
  PERSIA_RETURN_IF_ERROR(CheckOptions(options));
  PERSIA_ASSIGN_OR_RETURN(auto rows, store::StoreSnapshot::TakeChanges(store, options.rows));
  return Of(std::move(rows), options);
}

std::unique_ptr<Snapshot> Snapshot::Of(std::unique_ptr<store::StoreSnapshot> rows,
                                       const Options& options) {
  std::unique_ptr<Snapshot> snapshot(new Snapshot(std::move(rows)));
  snapshot->throttle_.emplace(snapshot->rows_.get(), options.max_processors);
  for (uint32_t i = 0; i < options.num_parts; ++i) snapshot->AddPart(options, i);
  snapshot->feed_.emplace(snapshot->rows_.get(), options.num_parts, options.rows_at_a_time);
  return snapshot;
}

void Snapshot::AddPart(const Options& options, uint32_t number) {
  const FileHeader header{.step = step(),
                          .num_rows = num_rows(),
                          .part = number,
                          .num_parts = options.num_parts,
                          .replica_index = options.replica.index,
                          .replica_size = options.replica.placement.num_servers(),
                          .kind = kind(),
                          .config = config()};
  // Every part must get on even where there are very many.
  const size_t gathered =
      std::max(options.max_gathered_bytes / options.num_parts, BlockWriter::kBlockBytes);
  parts_.push_back(std::make_unique<SnapshotPart>(this, header, options.with_state, gathered));
}

FileKind Snapshot::kind() const {
  if (!rows_->is_of_changes()) return FileKind::kRows;
  return rows_->is_from_nothing() ? FileKind::kChangesFromNothing : FileKind::kChanges;
}

// A packet that lacks a row would leave followers wrong for ever: so each part must have been read
// to its end, and the rows must add up.
Status Snapshot::Commit() {
  const uint32_t num_written = num_parts_written_.load();
  if (num_written != num_parts() || num_rows_written_.load() != num_rows()) {
    return FailedPrecondition("the snapshot has ", num_parts(), " parts, but ", num_written,
                              " were read to the end; read and store all of them first");
  }
  rows_->Commit();
  return Status::Ok();
}

StatusOr<SnapshotPart*> Snapshot::part(uint32_t number) {
  if (number < parts_.size()) return parts_[number].get();
  return InvalidArgument("part ", number, " was asked for; the snapshot has ", parts_.size());
}

// The last part is not completed when rows are missing or there twice.
Status Snapshot::CheckEnd(uint64_t count) {
  num_rows_written_ += count;
  if (++num_parts_written_ < parts_.size()) return Status::Ok();
  // Only now: another part may have added its rows since, and counted itself before this one.
  const uint64_t written = num_rows_written_.load();
  if (written == num_rows()) return Status::Ok();
  return Internal("the snapshot has ", num_rows(), " rows, but ", written, " were written");
}

}  // namespace persia::checkpoint

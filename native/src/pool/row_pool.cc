#include "pool/row_pool.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace persia::pool {

Status RowPool::CheckHealth() const {
  if (!has_failed_) return Status::Ok();
  return IOError(
      "the pool's device has failed before, and nothing more is written; its last committed "
      "checkpoint is whole: see to the device, then start again");
}

// For errors of the device, after which what it holds is unknown: a page whose write-back failed
// may read as written, and a later sync may report success.
Status RowPool::Fail(Status status) {
  if (!status.ok()) has_failed_ = true;
  return status;
}

// A cell never crosses the end of its extent.
Status RowPool::CheckSize(uint32_t dim, uint32_t state_floats) const {
  const uint64_t room = extent_bytes_ - ExtentHeader::kBytes;
  if (dim != 0 && CellBytes(size_t{dim} + state_floats) <= room) return Status::Ok();
  return InvalidArgument("a row of dim ", dim, " with ", state_floats,
                         " floats of state does not fit an extent of the pool, which has ", room,
                         " bytes; lower the dim, or make a pool of larger extent_bytes");
}

Status RowPool::CheckWrite(const RowWrite& row) const {
  const RowHead& head = row.head;
  PERSIA_RETURN_IF_ERROR(CheckSize(head.dim, head.state_floats));
  if (head.version <= committed_ || head.version >= RowRecord::kNever) {
    return Internal("a row of batch ", head.version, " is written behind the checkpoint of batch ",
                    committed_);
  }
  return Status::Ok();
}

// The caller holds mutex_. Extents are taken and the file grows only when no cell of the size is
// free.
std::optional<uint64_t> RowPool::TakeCell(uint32_t cell_bytes, Status* status) {
  if (const auto address = cells_.Take(cell_bytes)) return address;
  auto extent = cells_.Assign(cell_bytes);
  if (!extent) {
    const uint64_t size = cells_.end_of_extents() + extent_bytes_;
    *status = size <= max_bytes_ ? backing_->Grow(size)
                                 : ResourceExhausted("the pool is full: size_bytes is ", max_bytes_,
                                                     "; grow the pool");
    if (!status->ok()) return std::nullopt;
    cells_.AddExtent();
    extent = cells_.Assign(cell_bytes);
  }
  *status = Fail(AssignExtent(*extent, cell_bytes));
  return status->ok() ? cells_.Take(cell_bytes) : std::nullopt;
}

// The id is a part of its rows' checksums: rows of an earlier use of the extent are not whole.
Status RowPool::AssignExtent(uint64_t offset, uint32_t cell_bytes) {
  const ExtentHeader header{.cell_bytes = cell_bytes, .id = DrawId()};
  extent_ids_[(offset - PoolHeader::kBytes) / extent_bytes_] = header.id;
  return WriteExtentHeader(filling_id_, offset, header, backing_.get());
}

// By an array of atomics: readers take no lock.
uint64_t RowPool::SeedOf(uint64_t address) const {
  const auto& id = extent_ids_[(address - PoolHeader::kBytes) / extent_bytes_];
  return RecordSeed(id.load(std::memory_order_relaxed), address);
}

// A version that is written over was not there yet at any checkpoint, and the new one is part of
// all that are to come: until one of these is committed, whatever the cell holds is undone.
Status RowPool::TakeCells(std::span<const RowWrite> rows, std::span<Version> replaced,
                          std::span<uint64_t> addresses) {
  std::lock_guard lock(mutex_);
  for (const RowWrite& row : rows) PERSIA_RETURN_IF_ERROR(CheckWrite(row));
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowHead& head = rows[i].head;
    const auto cell_bytes = static_cast<uint32_t>(CellBytes(head.num_floats()));
    Version& old = replaced[i];
    if (old.address != kNoAddress && cells_.cell_bytes(old.address) == cell_bytes &&
        !IsNeeded({old.address, old.record.head.version, head.version})) {
      addresses[i] = std::exchange(old.address, kNoAddress);
      continue;
    }
    Status status;
    const auto address = TakeCell(cell_bytes, &status);
    if (!address) {
      for (size_t j = 0; j < i; ++j) {
        if (addresses[j] != rows[j].replaces) cells_.Free(addresses[j]);
      }
      return status;
    }
    addresses[i] = *address;
  }
  for (const RowWrite& row : rows) {
    newest_ = std::max(newest_, row.head.version);
    if (row.replaces == kNoAddress) CountRows(row.head.version, 1);
  }
  return Status::Ok();
}

// A row that is replaced stays one row, but only from its new version on it is the new one's.
void RowPool::CountRows(uint64_t version, int64_t count) {
  for (Pending& pending : pending_) {
    if (version > pending.batch) continue;
    pending.new_rows += count;
    return;
  }
  new_rows_ += count;
}

// Without mutex_: cells are taken, and no other call knows them yet.
Status RowPool::WriteRecords(std::span<const RowWrite> rows, std::span<const uint64_t> addresses) {
  std::vector<std::byte> cell;
  for (size_t i = 0; i < rows.size(); ++i) {
    cell.resize(CellBytes(rows[i].head.num_floats()));
    EncodeRecord(rows[i].head, rows[i].values, SeedOf(addresses[i]), cell);
    PERSIA_RETURN_IF_ERROR(backing_->Write(addresses[i], cell));
  }
  return Status::Ok();
}

// Drained before Release(): a cell may be used again only when the end of its old version has left
// the processor's caches.
Status RowPool::Write(std::span<const RowWrite> rows, std::span<uint64_t> addresses) {
  PERSIA_RETURN_IF_ERROR(CheckHealth());
  std::vector<RowRemoval> removals;
  for (const RowWrite& row : rows) {
    removals.push_back({row.replaces, row.head.sign, row.head.version});
  }
  auto found = FindLiving(removals);
  if (!found.ok()) return Fail(found.status());
  std::vector<Version>& replaced = *found;
  // In this order: until a record is whole the version before is the row's, so a crash in between
  // leaves each row once.
  PERSIA_RETURN_IF_ERROR(TakeCells(rows, replaced, addresses));
  PERSIA_RETURN_IF_ERROR(Fail(WriteRecords(rows, addresses)));
  std::vector<Ended> ended;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (replaced[i].address == kNoAddress) continue;
    PERSIA_RETURN_IF_ERROR(Fail(End(replaced[i], rows[i].head.version, &ended)));
  }
  backing_->Drain();
  Release(ended);
  return Status::Ok();
}

// Only ends the version, whose cell is kept as long as a checkpoint may need it.
Status RowPool::Remove(std::span<const RowRemoval> rows) {
  PERSIA_RETURN_IF_ERROR(CheckHealth());
  auto living = FindLiving(rows);
  if (!living.ok()) return Fail(living.status());
  std::vector<Ended> ended;
  for (size_t i = 0; i < rows.size(); ++i) {
    PERSIA_RETURN_IF_ERROR(Fail(End((*living)[i], rows[i].version, &ended)));
  }
  backing_->Drain();
  {
    std::lock_guard lock(mutex_);
    for (const RowRemoval& row : rows) {
      newest_ = std::max(newest_, row.version);
      CountRows(row.version, -1);
    }
  }
  Release(ended);
  return Status::Ok();
}

// Extents are valid with the filling's number alone: a new one, and there are none.
Status RowPool::Clear() {
  PERSIA_RETURN_IF_ERROR(CheckHealth());
  std::lock_guard header_lock(header_mutex_);
  PoolHeader header = header_;
  header.filling_id = DrawId();
  header.committed = 0;
  header.num_rows = 0;
  PERSIA_RETURN_IF_ERROR(WriteHeaderDurably(std::move(header)));
  std::lock_guard lock(mutex_);
  filling_id_ = header_.filling_id;
  committed_ = 0;
  last_checkpoint_ = 0;
  newest_ = 0;
  new_rows_ = 0;
  pending_.clear();
  kept_.clear();
  cells_.ForgetAll();
  return Status::Ok();
}

// Read back from the device, not kept in memory: 16 bytes for each row of a pool would be more than
// its index has.
StatusOr<std::vector<RowPool::Version>> RowPool::FindLiving(
    std::span<const RowRemoval> rows) const {
  std::vector<Version> versions(rows.size());
  std::vector<ReadPiece> pieces;
  for (size_t i = 0; i < rows.size(); ++i) {
    versions[i].address = rows[i].address;
    if (rows[i].address == kNoAddress) continue;
    pieces.push_back({rows[i].address, std::as_writable_bytes(std::span(&versions[i].record, 1))});
  }
  PERSIA_RETURN_IF_ERROR(backing_->ReadMany(pieces));
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowRemoval& row = rows[i];
    const RowRecord& record = versions[i].record;
    if (row.address == kNoAddress) continue;
    if (record.head.sign != row.sign || record.HasEnded() || record.head.version > row.version) {
      return Corruption("the pool has no living row of sign ", row.sign, " at offset ", row.address,
                        "; its file was damaged: remove it and load a checkpoint");
    }
  }
  return versions;
}

// The tag in the end is that of the record which is there (row_record.h).
Status RowPool::End(const Version& version, uint64_t batch, std::vector<Ended>* ended) {
  const uint64_t end = version.record.EndAt(batch);
  PERSIA_RETURN_IF_ERROR(backing_->Write(version.address + offsetof(RowRecord, end),
                                         std::as_bytes(std::span(&end, 1))));
  ended->push_back({version.address, version.record.head.version, batch});
  return Status::Ok();
}

// As of a checkpoint that recovery may go back to. Those to come are not before `end`.
bool RowPool::IsNeeded(const Ended& ended) const {
  const auto is_alive_at = [&](uint64_t batch) {
    return ended.version <= batch && batch < ended.end;
  };
  return is_alive_at(committed_) ||
         std::any_of(pending_.begin(), pending_.end(),
                     [&](const Pending& pending) { return is_alive_at(pending.batch); });
}

void RowPool::Release(std::span<const Ended> ended) {
  std::lock_guard lock(mutex_);
  for (const Ended& version : ended) {
    if (IsNeeded(version)) {
      kept_.push_back(version);
    } else {
      cells_.Free(version.address);
    }
  }
}

// A mapped row is checked and copied from where it lies: one copy, not two.
Status RowPool::Read(uint64_t address, uint64_t sign, RowHead* head,
                     std::span<float> values) const {
  const size_t cell_bytes = CellBytes(values.size());
  thread_local std::vector<std::byte> copy;
  const std::byte* mapped =
      address + cell_bytes <= backing_->size() ? backing_->Mapped(address) : nullptr;
  if (mapped == nullptr) {
    copy.resize(cell_bytes);
    PERSIA_RETURN_IF_ERROR(backing_->Read(address, copy));
    mapped = copy.data();
  }
  if (Decode({mapped, cell_bytes}, address, sign, head, values)) return Status::Ok();
  return Corruption("the row of sign ", sign, " at offset ", address,
                    " of the pool is damaged; load a checkpoint");
}

bool RowPool::Decode(std::span<const std::byte> cell, uint64_t address, uint64_t sign,
                     RowHead* head, std::span<float> values) const {
  RowRecord record;
  if (!DecodeRecord(cell, SeedOf(address), &record) || record.head.sign != sign ||
      record.head.num_floats() != values.size()) {
    return false;
  }
  *head = record.head;
  std::copy_n(reinterpret_cast<const float*>(cell.data() + sizeof(record)), values.size(),
              values.begin());
  return true;
}

namespace {

// Pieces of a buffer of the thread's, one after the other.
template <typename Row, typename BytesOf>
std::vector<ReadPiece> PiecesOf(std::span<Row> rows, BytesOf bytes_of) {
  thread_local std::vector<std::byte> buffer;
  size_t num_bytes = 0;
  for (const Row& row : rows) num_bytes += bytes_of(row);
  buffer.resize(num_bytes);
  std::vector<ReadPiece> pieces;
  std::span left(buffer);
  for (const Row& row : rows) {
    pieces.push_back({row.address, left.first(bytes_of(row))});
    left = left.subspan(bytes_of(row));
  }
  return pieces;
}

}  // namespace

void RowPool::ReadMany(std::span<RowRead> rows) const {
  const auto pieces =
      PiecesOf(rows, [](const RowRead& row) { return CellBytes(row.values.size()); });
  const bool are_read = backing_->ReadMany(pieces).ok();
  for (size_t i = 0; i < rows.size(); ++i) {
    RowRead& row = rows[i];
    row.is_found = are_read && Decode(pieces[i].out, row.address, row.sign, &row.head, row.values);
  }
}

// What is read is not looked at: only the page cache is warmed.
void RowPool::BringNear(std::span<const Place> rows) const {
  static_cast<void>(backing_->ReadMany(
      PiecesOf(rows, [](const Place& row) { return CellBytes(row.num_floats); })));
}

Status RowPool::BeginCheckpoint(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(CheckHealth());
  std::lock_guard lock(mutex_);
  const uint64_t last = last_checkpoint_;
  if (batch <= last || batch < newest_ || batch >= RowRecord::kNever) {
    return InvalidArgument("a checkpoint of batch ", batch, " was asked for after one of batch ",
                           last, " and rows of batch ", newest_,
                           "; checkpoints have ascending numbers and begin before later batches");
  }
  if (pending_.size() == max_pending_) {
    return ResourceExhausted(max_pending_,
                             " checkpoints are pending, as many as may be; wait until one is "
                             "committed");
  }
  pending_.push_back({batch, std::exchange(new_rows_, 0)});
  last_checkpoint_ = batch;
  return Status::Ok();
}

Status RowPool::Commit(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(CheckHealth());
  std::lock_guard header_lock(header_mutex_);
  PERSIA_ASSIGN_OR_RETURN(PoolHeader header, HeaderAt(batch));
  // The rows first: a header that is durable before them would name a checkpoint that lacks some.
  PERSIA_RETURN_IF_ERROR(Fail(backing_->Sync()));
  PERSIA_RETURN_IF_ERROR(WriteHeaderDurably(std::move(header)));
  std::lock_guard lock(mutex_);
  committed_ = batch;
  pending_.erase(pending_.begin());
  NoteCheckpoints();
  return Status::Ok();
}

StatusOr<PreparedCheckpoint> RowPool::Prepare(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(CheckHealth());
  std::lock_guard header_lock(header_mutex_);
  PERSIA_ASSIGN_OR_RETURN(const PoolHeader header, HeaderAt(batch));
  PERSIA_RETURN_IF_ERROR(Fail(backing_->Sync()));
  return PreparedCheckpoint{batch, header.num_rows, header.pool_id, header.sequence};
}

// Its rows belong to the next checkpoint, so that one's count takes them over.
Status RowPool::DropCheckpoint(uint64_t batch) {
  std::lock_guard header_lock(header_mutex_);  // none is being committed
  std::lock_guard lock(mutex_);
  const auto dropped = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending& pending) { return pending.batch == batch; });
  if (dropped == pending_.end()) {
    return InvalidArgument("no checkpoint of batch ", batch, " is pending");
  }
  const int64_t new_rows = dropped->new_rows;
  const auto next = pending_.erase(dropped);
  (next == pending_.end() ? new_rows_ : next->new_rows) += new_rows;
  NoteCheckpoints();
  return Status::Ok();
}

StatusOr<PoolHeader> RowPool::HeaderAt(uint64_t batch) const {
  std::lock_guard lock(mutex_);
  if (pending_.empty() || pending_.front().batch != batch) {
    return InvalidArgument("batch ", batch, " is not the oldest pending checkpoint");
  }
  PoolHeader header = header_;
  header.committed = batch;
  header.num_rows += static_cast<uint64_t>(pending_.front().new_rows);
  return header;
}

void RowPool::NoteCheckpoints() {
  last_checkpoint_ = pending_.empty() ? committed_.load() : pending_.back().batch;
  std::erase_if(kept_, [&](const Ended& version) {
    if (IsNeeded(version)) return false;
    cells_.Free(version.address);
    return true;
  });
}

// The two copies in turns: where this one does not get there whole, the other holds.
Status RowPool::WriteHeaderDurably(PoolHeader header) {
  PERSIA_RETURN_IF_ERROR(Fail(WriteHeader(&header, backing_.get())));
  PERSIA_RETURN_IF_ERROR(Fail(backing_->Sync()));
  header_ = std::move(header);
  return Status::Ok();
}

std::optional<uint64_t> RowPool::oldest_pending() const {
  std::lock_guard lock(mutex_);
  return pending_.empty() ? std::nullopt : std::optional(pending_.front().batch);
}

// Row counts of pending checkpoints add up: any of them may be the one that is committed last.
bool RowPool::HasRowsInCheckpoints() const {
  std::lock_guard header_lock(header_mutex_);
  std::lock_guard lock(mutex_);
  auto num_rows = static_cast<int64_t>(header_.num_rows);
  return num_rows > 0 || std::any_of(pending_.begin(), pending_.end(), [&](const Pending& pending) {
           num_rows += pending.new_rows;
           return num_rows > 0;
         });
}

PoolStats RowPool::stats() const {
  std::lock_guard lock(mutex_);
  return {.size_bytes = cells_.end_of_extents(),
          .max_bytes = max_bytes_,
          .used_bytes = cells_.used_bytes(),
          .memory_bytes = cells_.memory_bytes() + kept_.capacity() * sizeof(Ended),
          .num_kept = kept_.size(),
          .committed = committed_,
          .num_pending = static_cast<uint32_t>(pending_.size())};
}

}  // namespace persia::pool

#include "store/row_cache.h"

#include <algorithm>
#include <functional>
#include <string>

#include "store/probe_in_blocks.h"
#include "store/row_features.h"

namespace persia::store {

RowCache::RowCache(std::mutex* mutex, ShardTable* table, RowFeatures* features, StoreTier* tier,
                   CacheBudget budget, uint64_t num_pinned)
    : mutex_(*mutex),
      table_(*table),
      index_(table->index()),
      slabs_(table->slabs()),
      features_(*features),
      tier_(*tier),
      resident_(budget),
      pinned_(num_pinned) {
  if (!tier_.pool().is_mapped()) marks_ = std::make_unique<RowMarks>();
}

// The table's rows are gone already, and the tier was cleared with them; statistics are totals and
// stay.
void RowCache::Clear() {
  oldest_.Clear();
  resident_.RemoveAll();
  hot_keys_.Clear();
}

// Before a row is made that could never be demoted.
Status RowCache::CheckFits(uint64_t key, uint32_t dim) const {
  return tier_.pool().CheckSize(dim, table_.policies()->OfKey(key).ShapeFor(dim).state_floats);
}

// Under the mutex, for a caller that reads few rows: values of the thread, as rows differ in
// length.
Status RowCache::CopyCold(const Entry& entry, uint32_t dim, float* out) const {
  thread_local std::vector<float> values;
  pool::RowHead head;
  PERSIA_RETURN_IF_ERROR(ReadCold(tier_.pool(), entry, slabs_, &head, &values));
  std::copy_n(values.begin(), dim, out);
  return Status::Ok();
}

// The cold cell is freed last: whatever fails before leaves the row as it was. The tier keeps its
// version, which the resident row names, so that demoting it unchanged writes nothing.
Status RowCache::Promote(Entry* entry, const pool::RowRead* read) {
  const ColdRow cold = ColdRowOf(slabs_, entry->cell);
  const RowShape shape = table_.ShapeOf(entry->key, cold.dim);
  const uint32_t cell = slabs_.Allocate(slabs_.FindOrAddPool(shape));
  if (cell == RowSlabs::kNoCell) return OutOfMemory(table_);
  pool::RowHead head;
  if (read != nullptr && read->address == cold.address) {
    head = read->head;
    std::copy(read->values.begin(), read->values.end(), slabs_.values(cell));
  } else {
    Status status =
        tier_.pool().Read(cold.address, SignOfKey(entry->key), &head,
                          std::span(slabs_.values(cell), size_t{cold.dim} + cold.state_floats));
    if (!status.ok()) {
      slabs_.Free(cell);
      return status;
    }
  }
  if (shape.has_scalar) *slabs_.scalar(cell) = head.scalar;
  SetHotRow(slabs_, cell, HotRow{cold.address, 0});
  slabs_.Free(entry->cell);
  entry->cell = cell;
  NoteResident(entry->key, cell);
  ++num_promoted_;
  return Status::Ok();
}

// Cold rows that the call is about to read get the stamp of now, or a call that gets in between
// could evict them from the store as the oldest. A snapshot tells by stamps which rows it has to
// save, so while there is one they are stamped when they are found.
void RowCache::KeepCold(std::span<const MissingRef> missing) {
  if (marks_ == nullptr || features_.snapshot != nullptr) return;
  for (const auto& [run, ref] : missing) {
    Entry* entry = index_.Find(ref->key);
    if (entry != nullptr && IsColdOfDim(*entry, run->dim)) entry->stamp = table_.now();
  }
}

// Inference does not promote: serving many users' rows once each would evict those that training
// needs.
Status RowCache::Read(Lock* lock, std::vector<MissingRef>* missing, float* rows) {
  std::vector<MissingRef> cold, left;
  for (const MissingRef& each : *missing) {
    const Entry* entry = index_.Find(each.ref->key);
    const bool is_cold = entry != nullptr && IsColdOfDim(*entry, each.run->dim);
    (is_cold ? cold : left).push_back(each);
  }
  CountHits(0, cold.size());
  Status status;
  for (size_t begin = 0; begin < cold.size() && status.ok(); begin += kAheadAtATime) {
    const auto some = std::span<const MissingRef>(cold).subspan(
        begin, std::min(kAheadAtATime, cold.size() - begin));
    status = ReadSome(lock, some, rows, &left);
  }
  missing->swap(left);
  return status;
}

Status RowCache::ReadSome(Lock* lock, std::span<const MissingRef> some, float* rows,
                          std::vector<MissingRef>* left) {
  // The thread's, with its buffers.
  thread_local ColdReads reads;
  reads.Clear();
  ReadAside(lock, some, kKeyOfMissing, &reads);
  for (const MissingRef& missing : some) {
    const auto& [run, ref] = missing;
    float* out = rows + run->FloatOffset(*ref);
    const pool::RowRead* read = reads.Find(ref->key, marks_.get());
    const Entry* entry = index_.Find(ref->key);
    if (entry != nullptr && IsColdOfDim(*entry, run->dim)) {
      if (read != nullptr && read->address == ColdRowOf(slabs_, entry->cell).address) {
        std::copy_n(read->values.begin(), run->dim, out);
      } else {
        PERSIA_RETURN_IF_ERROR(CopyCold(*entry, run->dim, out));
      }
    } else if (HasDim(slabs_, entry, run->dim)) {
      std::copy_n(slabs_.values(entry->cell), run->dim, out);  // rows of a tier are float32
    } else {                                                   // removed meanwhile
      left->push_back(missing);
    }
  }
  return Status::Ok();
}

void RowCache::TouchCold(std::span<Entry* const> entries) const {
  const auto for_each_cold = [&](const auto& touch) {
    for (const Entry* entry : entries) {
      if (entry != nullptr && IsCold(slabs_, entry->cell)) touch(entry->cell);
    }
  };
  for_each_cold([&](uint32_t cell) { Touch(slabs_.values(cell)); });
  for_each_cold([&](uint32_t cell) {
    const ColdRow cold = ColdRowOf(slabs_, cell);
    tier_.pool().Touch(cold.address, size_t{cold.dim} + cold.state_floats);
  });
}

// Rows and, where the tier is mapped, the versions that they replace: both are read when they are
// written.
void RowCache::TouchForWrite(std::span<Entry* const> entries) const {
  for (const Entry* entry : entries) {
    TouchRow(slabs_.values(entry->cell), slabs_.shape(entry->cell).Stride());
  }
  for (const Entry* entry : entries) {
    const HotRow hot = HotRowOf(slabs_, entry->cell);
    const RowShape& shape = slabs_.shape(entry->cell);
    if (hot.unsaved == 0 || hot.address == pool::kNoAddress) continue;
    tier_.pool().Touch(hot.address, size_t{shape.dim} + shape.state_floats);
  }
}

// A row that is adopted cold was recovered or never resident: it takes no room in the budget. One
// that is new is of this batch, and the tier has nothing of it.
void RowCache::NoteInserted(uint64_t key, uint32_t cell) {
  if (IsCold(slabs_, cell)) return;
  SetHotRow(slabs_, cell, HotRow{pool::kNoAddress, tier_.batch()});
  NoteResident(key, cell);
}

void RowCache::NoteResident(uint64_t key, uint32_t cell) {
  resident_.Add(slabs_.row_bytes(cell));
  ++num_came_;
  came_bytes_ += slabs_.row_bytes(cell);
  hot_keys_.Add(key);
  DropColdKeys();
}

// Rows that are made and removed without ever being evicted leave their keys in the list.
void RowCache::DropColdKeys() {
  constexpr size_t kFew = 1024;
  if (hot_keys_.size() <= 2 * resident_.num_rows() + kFew) return;
  hot_keys_.ForEach(
      index_, [this](const Entry& entry) { return !IsCold(slabs_, entry.cell); },
      [](const Entry&) {});
}

// From the list of resident keys, not from the index, which may have a hundred times as many
// entries.
void RowCache::CollectOldest() {
  std::vector<Entry> candidates;
  candidates.reserve(resident_.num_rows());
  hot_keys_.ForEach(
      index_, [this](const Entry& entry) { return !IsCold(slabs_, entry.cell); },
      [&](const Entry& entry) {
        if (!pinned_.Contains(entry.key)) candidates.push_back(entry);
      });
  oldest_.CollectFrom(candidates);
}

Status RowCache::WriteBack(std::span<Entry* const> entries) {
  std::vector<pool::RowWrite> writes;
  for (const Entry* entry : entries) {
    const RowShape& shape = slabs_.shape(entry->cell);
    const HotRow hot = HotRowOf(slabs_, entry->cell);
    writes.push_back({.head = {.sign = SignOfKey(entry->key),
                               .version = hot.unsaved,
                               .dim = shape.dim,
                               .state_floats = shape.state_floats,
                               .scalar = shape.has_scalar ? *slabs_.scalar(entry->cell) : 0,
                               .has_scalar = shape.has_scalar ? 1u : 0u},
                      .values = slabs_.values(entry->cell),
                      .replaces = hot.address});
  }
  // Before the write: a read of the tier that is under way may find the old version, the new one or
  // half of it, and must be thrown away in any case.
  if (marks_ != nullptr) {
    for (const Entry* entry : entries) marks_->NoteWrite(entry->key);
  }
  std::vector<uint64_t> addresses(writes.size());
  PERSIA_RETURN_IF_ERROR(tier_.pool().Write(writes, addresses));
  for (size_t i = 0; i < entries.size(); ++i) {
    SetHotRow(slabs_, entries[i]->cell, HotRow{addresses[i], 0});
  }
  num_written_ += entries.size();
  return Status::Ok();
}

// Most rows were not changed since the last checkpoint was begun, or no checkpoint is pending: two
// loads for each row that changes.
Status RowCache::WriteForCheckpoint(uint64_t key, uint32_t cell) {
  if (IsCold(slabs_, cell)) return Status::Ok();
  const uint64_t unsaved = HotRowOf(slabs_, cell).unsaved;
  if (unsaved == 0 || unsaved > tier_.pool().last_checkpoint()) [[likely]]
    return Status::Ok();
  // WriteBack() needs no more of an entry than these two.
  Entry entry = {key, cell, 0};
  Entry* const entries[] = {&entry};
  return WriteBack(entries);
}

bool RowCache::BeforeChange(const Entry& entry, Status* status) {
  if (status->ok()) *status = WriteForCheckpoint(entry.key, entry.cell);
  if (!status->ok()) return false;
  SetHotRow(slabs_, entry.cell, HotRow{HotRowOf(slabs_, entry.cell).address, tier_.batch()});
  return true;
}

// A device that does not take the removal has failed for good: the row would come back.
void RowCache::NoteRemoval(const Entry& entry) {
  const bool is_cold = IsCold(slabs_, entry.cell);
  const uint64_t address =
      is_cold ? ColdRowOf(slabs_, entry.cell).address : HotRowOf(slabs_, entry.cell).address;
  if (!is_cold) resident_.Remove(slabs_.row_bytes(entry.cell));
  if (address == pool::kNoAddress) return;
  const pool::RowRemoval removal{address, SignOfKey(entry.key), tier_.batch()};
  tier_.Fail(tier_.pool().Remove({&removal, 1}));
}

// Rows are written many at a time; only then do they leave the cache.
Status RowCache::DemoteRows(std::span<Entry* const> entries) {
  std::array<Entry*, kRowsAtATime> unsaved;
  size_t num_unsaved = 0;
  TouchForWrite(entries);
  for (Entry* entry : entries) {
    if (HotRowOf(slabs_, entry->cell).unsaved != 0) unsaved[num_unsaved++] = entry;
  }
  if (num_unsaved > 0) PERSIA_RETURN_IF_ERROR(WriteBack(std::span(unsaved).first(num_unsaved)));
  for (Entry* entry : entries) {
    const RowShape& shape = slabs_.shape(entry->cell);
    // An address of eight bytes in the place of the row; which takes memory before it gives some
    // back.
    const uint32_t cold = AllocateCold(
        {HotRowOf(slabs_, entry->cell).address, shape.dim, shape.state_floats}, &slabs_);
    if (cold == RowSlabs::kNoCell) return OutOfMemory(table_);
    resident_.Remove(slabs_.row_bytes(entry->cell));
    slabs_.Free(entry->cell);
    entry->cell = cold;
    ++num_demoted_;
  }
  return Status::Ok();
}

// Rows that stay because there was no room are in their turn again with the next pass.
Status RowCache::Demote(size_t count) {
  std::array<Entry*, kRowsAtATime> oldest;
  while (count > 0) {
    if (oldest_.is_empty()) CollectOldest();
    if (oldest_.is_empty()) pinned_.Clear();  // there are no others
    size_t num_oldest = 0;
    while (num_oldest < std::min(count, kRowsAtATime)) {
      Entry* entry = oldest_.PopCollected(index_);
      if (entry == nullptr) break;
      if (IsCold(slabs_, entry->cell) || pinned_.Contains(entry->key)) continue;
      oldest[num_oldest++] = entry;
    }
    PERSIA_RETURN_IF_ERROR(DemoteRows(std::span(oldest).first(num_oldest)));
    count -= num_oldest;
  }
  return Status::Ok();
}

Status RowCache::DemoteLoaded(std::span<const Run> runs) {
  std::array<Entry*, kRowsAtATime> rows;
  size_t num_rows = 0;
  for (const Run& run : runs) {
    for (const RowRef& ref : run.refs) {
      if (resident_.Excess() <= num_rows) break;
      Entry* entry = index_.Find(ref.key);
      if (entry == nullptr || IsCold(slabs_, entry->cell)) continue;
      // A sign that is named twice has one row.
      if (std::find(rows.begin(), rows.begin() + num_rows, entry) != rows.begin() + num_rows) {
        continue;
      }
      rows[num_rows++] = entry;
      if (num_rows < kRowsAtATime) continue;
      PERSIA_RETURN_IF_ERROR(DemoteRows(rows));
      num_rows = 0;
    }
  }
  PERSIA_RETURN_IF_ERROR(DemoteRows(std::span(rows).first(num_rows)));
  return Limit();
}

// The lists have grown with the rows of the largest call. What they do not need any more is given
// back first: rows would be evicted for its sake.
void RowCache::Measure() {
  if (!resident_.counts_bytes()) return;
  DropColdKeys();
  hot_keys_.TrimMemory();
  oldest_.TrimMemory();
  // What slabs have beside the rows: cells of cold rows and their own bookkeeping.
  const uint64_t cell_bytes = slabs_.memory_bytes() - slabs_.row_slab_bytes();
  resident_.SetBeside(index_.memory_bytes() + cell_bytes + list_bytes() +
                      table_.victims().memory_bytes() + features_.memory_bytes());
}

Status RowCache::Limit() {
  Measure();
  Status status;
  // A call leaves a sixteenth at most, and wakes the maintenance thread at half of that, so that
  // calls themselves seldom demote.
  if (!resident_.IsWithin(32) || ExcessOfSlabs() > 0) {
    tier_.MarkOverBudget();
    if (!resident_.IsWithin(16)) status = EvictToBudget();
  }
  num_came_ = came_bytes_ = 0;
  return status;
}

// Demotes at most twice what became resident. The maintenance thread demotes the rest: rows are
// also too many where other memory, such as the index, has grown.
Status RowCache::EvictToBudget() {
  const uint64_t num_rows = resident_.num_rows(), num_bytes = resident_.num_bytes();
  const auto is_done = [&] {
    return num_rows - resident_.num_rows() >= 2 * num_came_ + kRowsAtATime &&
           num_bytes - resident_.num_bytes() >= 2 * came_bytes_;
  };
  while (resident_.Excess() > 0 && !is_done()) {
    PERSIA_RETURN_IF_ERROR(Demote(std::min(resident_.Excess(), kRowsAtATime)));
    Measure();  // the lists shrink with the rows
  }
  return Status::Ok();
}

// Only while a checkpoint is pending do changes need room.
Status RowCache::PrepareUpdate(std::span<const Run> runs) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(Limit());
  if (tier_.pool().committed() >= tier_.pool().last_checkpoint()) return Status::Ok();
  Status status;
  for (const Run& run : runs) {
    table_.ForEachRow(run, run.dim, [&](const RowRef& ref, const Entry* entry) {
      if (entry != nullptr && status.ok()) status = WriteForCheckpoint(ref.key, entry->cell);
    });
  }
  return status;
}

Status RowCache::EndUpdate(Status status) {
  if (!status.ok()) {
    // Other rows, here or in other shards, have their gradients already. To look for cold rows in
    // all shards first would cost too much, so the store stops.
    status = IOError("an update ended half way: " + status.message() +
                     "; the store has stopped: start again, from the last checkpoint");
    tier_.Fail(status);
  }
  // What is applied has not failed: where the cache stays too large, the next call is told.
  tier_.Fail(Limit());
  return status;
}

uint64_t RowCache::ExcessOfSlabs() const {
  const bool may_be_too_many = resident_.counts_bytes() && slabs_.CanLeave();
  return may_be_too_many ? resident_.ExcessOfSlabs(slabs_.row_slab_bytes()) : 0;
}

// What cannot be brought here, the lookup will be told.
Status RowCache::Prefetch(std::span<const uint64_t> keys) {
  Lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(Limit());
  ColdReads reads;
  ReadAside(&lock, keys, std::identity(), &reads);
  // Found only now: entries from before the mutex was released would not be valid.
  std::array<Entry*, kAheadAtATime> entries;
  for (size_t i = 0; i < keys.size(); ++i) entries[i] = index_.Find(keys[i]);
  if (reads.is_empty()) TouchCold(std::span(entries).first(keys.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    Entry* entry = entries[i];
    const pool::RowRead* read = reads.Find(keys[i], marks_.get());
    if (entry == nullptr) continue;
    pinned_.Add(entry->key);
    if (!IsCold(slabs_, entry->cell)) continue;
    PERSIA_RETURN_IF_ERROR(Promote(entry, read));
    ++num_prefetched_;
  }
  return Limit();
}

void RowCache::AddStatsTo(TierStats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->num_hot += resident_.num_rows();
  stats->hot_bytes += resident_.num_bytes();
  stats->num_rows += index_.size();
  stats->num_hits += num_hits_;
  stats->num_misses += num_misses_;
  stats->num_promoted += num_promoted_;
  stats->num_prefetched += num_prefetched_;
  stats->num_demoted += num_demoted_;
  stats->num_passes += oldest_.num_passes();
  stats->num_written += num_written_;
  stats->num_moved += num_moved_;
}

}  // namespace persia::store

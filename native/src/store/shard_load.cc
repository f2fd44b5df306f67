// The part of Shard that takes in rows of a checkpoint; see store_load.h.
#include <algorithm>
#include <cstring>
#include <string>

#include "store/shard.h"
#include "store/store_load.h"
#include "store/touch.h"

namespace persia::store {
namespace {

constexpr size_t kTouchedAtATime = 256;

// Policies of another store, or of another time, would read past the ends of its rows.
Status CheckShape(const RowPolicies& policies, const pool::RowHead& head) {
  const RowShape shape = policies.OfKey(SignKey(head.sign)).ShapeFor(head.dim);
  if (shape.state_floats == head.state_floats && shape.has_scalar == (head.has_scalar != 0)) {
    return Status::Ok();
  }
  return Corruption("the pool's row of sign " + std::to_string(head.sign) + " has dim " +
                    std::to_string(head.dim) + " and " + std::to_string(head.state_floats) +
                    " floats of optimizer state, and by the file rules beside the pool it has " +
                    std::to_string(shape.state_floats) +
                    "; the file is of other rows: put the right one there, or remove both and "
                    "load a checkpoint");
}

}  // namespace

// Stamps of the past must be there for the rows to come: the present moves on by 2^31 batches,
// which is also as far back as RebaseStamps() remembers.
void Shard::BeginLoad() {
  std::lock_guard lock(mutex_);
  features_.expiry.Forget();
  features_.ForgetVictims();
  table_.MakePast();
}

void Shard::Reserve(uint64_t num_rows) {
  std::lock_guard lock(mutex_);
  table_.Reserve(num_rows);
}

Status Shard::Load(std::span<const Run> runs, const LoadedRows& rows, LookupReport* counts) {
  std::lock_guard lock(mutex_);
  // The order knows nothing of older rows that come later. The cache's may stay: which rows are
  // demoted while loading makes no difference, and to order them takes a pass over the index.
  table_.ForgetVictims();
  features_.limits.ForgetVictims();
  ChangeBatch changed(features_.changes);
  for (const Run& run : runs) {
    for (size_t i = 0; i < run.refs.size(); ++i) {
      if (i % kTouchedAtATime == 0) {  // their places in the index, all misses at once
        const size_t end = std::min(i + kTouchedAtATime, run.refs.size());
        for (size_t j = i; j < end; ++j) Touch(table_.index().HomeOf(run.refs[j].key));
      }
      PERSIA_RETURN_IF_ERROR(LoadRow(rows, run, run.refs[i], &changed, counts));
    }
  }
  if (table_.size() > table_.capacity() + table_.capacity() / 4) {
    PERSIA_RETURN_IF_ERROR(Trim(counts));
  }
  return cache_ == nullptr ? Status::Ok() : cache_->DemoteLoaded(runs);
}

Status Shard::LoadRow(const LoadedRows& rows, const Run& run, const RowRef& ref,
                      ChangeBatch* changed, LookupReport* counts) {
  const uint32_t stamp = table_.now() - std::min(table_.now(), rows.ages[ref.row]);
  Status status;
  Entry* entry = table_.index().Find(ref.key);
  if (cache_ != nullptr && entry != nullptr && cache_->IsColdOfDim(*entry, run.dim)) {
    PERSIA_RETURN_IF_ERROR(cache_->Promote(entry));
  }
  entry = table_.RemoveOfAnotherDim(ref.key, run.dim, &status);
  if (!status.ok()) return status;
  uint32_t cell;
  if (entry == nullptr) {
    if (cache_ != nullptr) PERSIA_RETURN_IF_ERROR(cache_->CheckFits(ref.key, run.dim));
    cell = table_.Allocate(ref.key, run.dim, stamp);
    if (cell == ShardTable::kNoCell) return table_.OutOfMemory();
    ++counts->num_inserted;
  } else {
    cell = entry->slot;
    features_.BeforeTouch(*entry, table_.slabs());
    if (!features_.BeforeChange(*entry, &status)) return status;
    entry->stamp = stamp;
    changed->Add(ref.key);
  }
  const RowView row = table_.slabs().View(cell);
  format_.Write(row.values, rows.embeddings + size_t{ref.row} * run.dim, run.dim);
  LoadState(rows, ref, row);
  features_.BeginCount(cell, table_.slabs());
  return Status::Ok();
}

Status Shard::AddRecovered(const pool::RecoveredRow& row) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckShape(*table_.policies(), row.head));
  const uint64_t key = SignKey(row.head.sign);
  const uint32_t slot =
      AllocateCold({row.address, row.head.dim, row.head.state_floats}, &table_.slabs());
  if (slot == RowSlabs::kNoSlot) return table_.OutOfMemory();
  table_.MakePast();
  const auto age = static_cast<uint32_t>(std::min<uint64_t>(row.age, table_.now()));
  const bool is_adopted = table_.Adopt({key, slot, table_.now() - age}) != ShardTable::kNoCell;
  return is_adopted ? Status::Ok() : table_.OutOfMemory();
}

Status Shard::RemoveRows(std::span<const Run> runs) {
  std::lock_guard lock(mutex_);
  ForgetVictims();
  for (const Run& run : runs) {
    for (const RowRef& ref : run.refs) {
      Entry* entry = table_.index().Find(ref.key);
      if (entry != nullptr) PERSIA_RETURN_IF_ERROR(table_.Remove(entry));
    }
  }
  return Status::Ok();
}

void Shard::LoadState(const LoadedRows& rows, const RowRef& ref, const RowView& row) const {
  const RowPolicy& policy = table_.policies()->OfKey(ref.key);
  if (rows.state == nullptr) return policy.InitializeState(row);
  const size_t state_floats = policy.ShapeFor(row.dim).state_floats;
  std::memcpy(row.state, rows.state + ref.row * state_floats, state_floats * sizeof(float));
  if (row.scalar != nullptr) *row.scalar = rows.scalars[ref.row];
}

// To the capacity.
Status Shard::Trim(LookupReport* counts) {
  const Status status = MakeRoom({}, /*keep_batch=*/false, counts).status();
  ForgetVictims();
  return status;
}

// Where a tier has no room for that, rows beyond the capacity are evicted by later calls.
Status Shard::FinishLoad(LookupReport* counts) {
  std::lock_guard lock(mutex_);
  ForgetVictims();
  return Trim(counts);
}

}  // namespace persia::store

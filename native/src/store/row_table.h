// RowTable: the rows of one internal shard: an index from keys to cells, slabs with the cells'
// memory, and the order of eviction. Rows are found, inserted, touched and evicted here.
//
// The order costs nothing where rows are only used: touching a row writes the number of the batch,
// its stamp, into the index entry that led to it. Sequential passes over the index find the oldest
// rows when some have to be evicted (victim_queue.h). Order is exact to the batch.
//
// What else a store does with its rows (snapshots, change tracking, group capacities, a storage
// tier, update counts) attaches as `Features`, which is told before rows are touched, removed or
// cleared and after they are inserted. It is a template parameter, so that a table without a
// feature pays for a branch at most. Features has
//   void BeforeTouch(const SignIndex::Entry&, const RowSlabs&);    // its stamp changes
//   Status BeforeRemove(const SignIndex::Entry&, const RowSlabs&); // an error: the row stays
//   void Inserted(uint64_t key, uint32_t cell, const RowSlabs&);   // values are not set yet
//   void BeforeClear(SignIndex*, RowSlabs*);                       // may take them over
//   void StampsFell();                                             // all by kStampRebase
//   uint32_t tail_floats() const;                                  // kept behind each row's state
//
// Not thread-safe: the caller holds the shard's mutex, or the store exclusively. Finding rows and
// touching different ones may run in several threads at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "store/probe_in_blocks.h"
#include "store/row_arrays.h"
#include "store/row_policy.h"
#include "store/row_slabs.h"
#include "store/sign_index.h"
#include "store/types.h"
#include "store/victim_queue.h"

namespace persia::store {

// Whether there is a row, and it is resident and has the dim.
inline bool HasDim(const RowSlabs& slabs, const SignIndex::Entry* entry, uint32_t dim) {
  return entry != nullptr && slabs.dim(entry->cell) == dim;
}

template <typename Features>
class RowTable {
 public:
  using Entry = SignIndex::Entry;
  static constexpr uint32_t kNoCell = RowSlabs::kNoCell;
  static_assert(kNoCell == SignIndex::kNoCell);

  // At most `capacity` rows, but for those that Allocate() adds while a checkpoint is loaded.
  // Memory of rows comes from `row_memory`, that of cold rows' cells from `cold_memory`; both and
  // `features` outlive the table. `growth_phase` as SignIndex's.
  RowTable(uint64_t capacity, SlabMemory* row_memory, SlabMemory* cold_memory, double growth_phase,
           Features* features)
      : capacity_(capacity),
        features_(features),
        index_(growth_phase),
        slabs_(row_memory, cold_memory) {}

  uint64_t capacity() const { return capacity_; }
  // Read through these; rows are inserted and removed through the table, which tells the features.
  const SignIndex& index() const { return index_; }
  const RowSlabs& slabs() const { return slabs_; }
  RowSlabs& slabs() { return slabs_; }
  // The stamp of rows that are touched now.
  uint32_t now() const { return now_; }
  // Rises with every removal. Without a tier, which moves rows, a cell found earlier still has the
  // same row as long as the number is the same.
  uint64_t num_removals() const { return num_removals_; }
  // The order of eviction. Its Clear() makes the next eviction find the order anew: to be called
  // where stamps have changed, or rows were inserted that are older than others.
  VictimQueue& victims() { return victims_; }
  const VictimQueue& victims() const { return victims_; }

  // Null before the first configuration: then there are no rows.
  const RowPolicies* policies() const { return policies_.get(); }
  // While there are rows, shapes must stay the same. Returns the old ones.
  std::shared_ptr<const RowPolicies> SetPolicies(std::shared_ptr<const RowPolicies> policies) {
    return std::exchange(policies_, std::move(policies));
  }
  // What a row of the key consists of, with what features keep behind it.
  RowShape ShapeOf(uint64_t key, uint32_t dim) const {
    RowShape shape = policies_->OfKey(key).ShapeFor(dim);
    shape.tail_floats = features_->tail_floats();
    return shape;
  }

  // Calls use(ref, entry) for each row of the run in order; the entry is null where there is no row
  // of the run's dim. `row_floats` of each row are brought into the processor's cache.
  template <typename Use>
  void ForEachRow(const Run& run, size_t row_floats, Use use) const {
    const std::span<const RowRef> refs = run.refs;
    ProbeInBlocks(
        refs.size(), row_floats, [&](size_t i) { return std::pair(refs[i].key, &index_); },
        [&](size_t, const Entry* entry) {
          return slabs_.dim(entry->cell) == run.dim ? slabs_.values(entry->cell) : nullptr;
        },
        [&](size_t i, Entry* entry, const float* row) {
          if (entry != nullptr) index_.Refresh(entry);
          use(refs[i], row == nullptr ? nullptr : entry);
        });
  }

  // A training batch begins: rows that are touched or inserted from now on are newer than others.
  void BeginBatch() {
    if (now_ == kLastStamp) {
      features_->StampsFell();
      RebaseStamps(index_);
      victims_.Clear();
      now_ -= kStampRebase;
    }
    ++now_;
  }
  // Leaves room for stamps of the past: rows that are 2^31 batches old can be inserted.
  void MakePast() {
    if (now_ >= kStampRebase) return;
    const uint32_t rise = kStampRebase - now_;
    index_.ChangeStamps([rise](uint32_t stamp) { return stamp + rise; });
    victims_.Clear();
    now_ += rise;
  }
  // Makes the row one of the batch `stamp`. For each row that a training call uses.
  void Touch(Entry* entry, uint32_t stamp) {
    features_->BeforeTouch(*entry, slabs_);
    index_.SetStamp(entry, stamp);
  }

  // Evicts the oldest rows until `num_new` can be inserted, as far as there are rows. With
  // `keep_batch` it stops, and returns false, where rows of the present batch would have to go.
  // Fails as Remove(). Adds to *num_evicted.
  StatusOr<bool> MakeRoom(uint64_t num_new, bool keep_batch, uint64_t* num_evicted) {
    if (keep_batch && num_new > capacity_) return false;
    const uint64_t wanted = index_.size() + num_new;
    uint64_t num_left = wanted > capacity_ ? std::min(wanted - capacity_, index_.size()) : 0;
    for (; num_left > 0; --num_left) {
      Entry* victim = victims_.Pop(index_);
      if (keep_batch && victim->stamp == now_) return false;
      if (Status status = Remove(victim); !status.ok()) {
        victims_.Clear();  // it stays, and is the oldest again
        return status;
      }
      ++*num_evicted;
    }
    return true;
  }
  // A row of a key that has none, as its policy begins one. The oldest row is evicted where the
  // table is full. kNoCell: there is no memory.
  uint32_t Insert(uint64_t key, uint32_t dim, uint64_t* num_evicted) {
    if (index_.size() >= capacity_ && !MakeRoom(1, /*keep_batch=*/false, num_evicted).ok())
      return kNoCell;
    const uint32_t cell = Allocate(key, dim, now_);
    if (cell == kNoCell) return kNoCell;
    policies_->OfKey(key).Initialize(SignOfKey(key), slabs_.View(cell));
    return cell;
  }
  // The same with uninitialised values, and a table that may become larger than its capacity.
  uint32_t Allocate(uint64_t key, uint32_t dim, uint32_t stamp) {
    uint32_t cell = slabs_.AllocateInArray(SignOfKey(key), dim);
    if (cell == kNoCell) cell = slabs_.Allocate(slabs_.FindOrAddPool(ShapeOf(key, dim)));
    return cell == kNoCell ? kNoCell : Adopt({key, cell, stamp});
  }
  // A row whose cell was allocated by the caller; it is freed, and kNoCell returned, where there is
  // no memory for the entry.
  uint32_t Adopt(const Entry& entry) {
    if (!index_.Insert(entry)) {
      slabs_.Free(entry.cell);
      return kNoCell;
    }
    if (index_.IsInArray(entry)) {
      arrays_->OfCell(entry.cell).InsertRow(arrays_->IdOfCell(entry.cell), entry.stamp);
    }
    features_->Inserted(entry.key, entry.cell, slabs_);
    return entry.cell;
  }
  // So many rows are expected: the index need not grow step by step. Only a matter of time.
  void Reserve(uint64_t num_rows) { index_.Reserve(std::min(num_rows, capacity_ + capacity_ / 4)); }

  // Fails with an error of the features, such as a tier's kResourceExhausted: then the row stays.
  // Invalidates entries, not cells.
  Status Remove(Entry* entry) {
    PERSIA_RETURN_IF_ERROR(features_->BeforeRemove(*entry, slabs_));
    slabs_.Free(entry->cell);
    index_.Erase(entry);
    ++num_removals_;
    return Status::Ok();
  }
  // Removes all rows and gives their memory back. Cannot fail: features have had their say. Later
  // rows are put into `arrays` where their signs belong there (row_arrays.h); null: there are none.
  // A table whose rows were in arrays needs new ones: rows stay in the old ones.
  void Clear(const std::shared_ptr<RowArrays>& arrays = nullptr) {
    features_->BeforeClear(&index_, &slabs_);
    index_.Clear(arrays);
    slabs_.Clear(arrays);
    arrays_ = arrays.get();
    victims_.Clear();
    ++num_removals_;
  }

 private:
  const uint64_t capacity_;
  Features* const features_;
  RowArrays* arrays_ = nullptr;  // kept alive by index_; null: none
  SignIndex index_;
  RowSlabs slabs_;
  VictimQueue victims_;
  std::shared_ptr<const RowPolicies> policies_;
  uint32_t now_ = 0;
  uint64_t num_removals_ = 0;
};

// The key's entry, or null; a row of another dim is removed, for a new one to take its place.
// *status becomes why it could not be.
template <typename Features>
SignIndex::Entry* RemoveOfAnotherDim(RowTable<Features>* table, uint64_t key, uint32_t dim,
                                     Status* status) {
  SignIndex::Entry* entry = table->index().Find(key);
  if (entry == nullptr || HasDim(table->slabs(), entry, dim)) return entry;
  if (Status removed = table->Remove(entry); !removed.ok()) *status = std::move(removed);
  return nullptr;
}

// What a caller reports when Insert() or Allocate() returned kNoCell.
template <typename Features>
Status OutOfMemory(const RowTable<Features>& table) {
  return ResourceExhausted("no memory for another row beside the " +
                           std::to_string(table.index().size()) + " in this shard (" +
                           std::to_string(table.slabs().memory_bytes()) +
                           " bytes); lower the capacity or add parameter servers");
}

}  // namespace persia::store

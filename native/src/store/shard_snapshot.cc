#include "store/shard_snapshot.h"

#include <algorithm>
#include <utility>

#include "store/cold_rows.h"
#include "store/probe_in_blocks.h"
#include "store/victim_queue.h"

namespace persia::store {

// Without a tier a dim of 0 does not occur, and nothing is looked up.
bool ShardSnapshot::IsColdRow(const SignIndex::Entry& entry, const RowSlabs& slabs) const {
  return pool_ != nullptr && IsCold(slabs, entry.cell);
}

// The stamp of a row that is read is never above that of the snapshot point: ages are not negative.
RowHead ShardSnapshot::HeadOf(const SignIndex::Entry& entry, const RowSlabs& slabs) const {
  const RowShape& shape = slabs.shape(entry.cell);
  return {.sign = SignOfKey(entry.key),
          .age = stamp_ - entry.stamp,
          .scalar = shape.has_scalar ? *slabs.scalar(entry.cell) : 0,
          .has_scalar = shape.has_scalar ? 1u : 0u,
          .dim = shape.dim,
          .state_floats = shape.state_floats};
}

std::pair<RowHead, const float*> ShardSnapshot::RowOf(const SignIndex::Entry& entry,
                                                      const RowSlabs& slabs,
                                                      std::vector<float>* values) const {
  if (!IsColdRow(entry, slabs)) {
    const RowHead head = HeadOf(entry, slabs);
    const RowView row = slabs.View(entry.cell);
    const RowFormat format(slabs.shape(entry.cell).dtype);
    if (format.narrow() == nullptr) return {head, row.values};
    values->resize(head.num_floats());
    format.Read(values->data(), row.values, row.dim);
    std::copy_n(row.state, head.state_floats, values->data() + row.dim);
    return {head, values->data()};
  }
  pool::RowHead head;
  if (const Status status = ReadCold(*pool_, entry, slabs, &head, values); !status.ok()) {
    budget_.Fail(status);
    return {RowHead(), nullptr};
  }
  return {RowHead{.sign = head.sign,
                  .age = stamp_ - entry.stamp,
                  .scalar = head.scalar,
                  .has_scalar = head.has_scalar,
                  .dim = head.dim,
                  .state_floats = head.state_floats},
          values->data()};
}

// The caller may be any training thread. A row that was saved before is not saved again: its first
// copy is that of the snapshot point.
void ShardSnapshot::Save(const SignIndex::Entry& entry, const RowSlabs& slabs, bool keeps_stamp) {
  // Of the training thread: copied before the mutex is taken, which other threads of this shard
  // want.
  thread_local std::vector<float> copy;
  const auto [head, values] = RowOf(entry, slabs, &copy);
  const size_t bytes = head.record_bytes();
  const std::lock_guard lock(mutex_);
  if (budget_.has_failed()) return;
  if (!saved_keys_.empty() && saved_keys_.count(entry.key) != 0) return;
  if (keeps_stamp || changes_ != nullptr) saved_keys_.insert(entry.key);
  if (saved_.empty() || !saved_.back().HasRoom(bytes)) {
    saved_.push_back(budget_.TakePiece(bytes));
  }
  saved_.back().Add(head, values);
}

// Pieces, not rows: the lock is held for moments.
void ShardSnapshot::TakeSaved(std::vector<RowRecords>* rows) {
  const std::lock_guard lock(mutex_);
  for (RowRecords& piece : saved_) rows->push_back(std::move(piece));
  saved_.clear();
}

// The rows cannot be copied one by one before they are removed: training would wait for all of
// them. Cold rows are in the tier alone, which is cleared with the store, so that such a snapshot
// is lost.
void ShardSnapshot::TakeOver(SignIndex index, RowSlabs slabs) {
  // What comes after the first time has been made since the cut.
  if (is_read_ || std::exchange(has_taken_over_, true)) return;
  if (pool_ != nullptr && index.size() != 0) {
    budget_.Fail(FailedPrecondition(
        "the rows were cleared while a snapshot read them from their pool; take another"));
  }
  index_ = std::move(index);
  slabs_ = std::move(slabs);
}

void ShardSnapshot::RebaseStamp() {
  // A shard that trained 2^31 batches during one snapshot: its old rows and its new ones would
  // become one.
  if (stamp_ < kStampRebase) return budget_.Fail();
  stamp_ -= kStampRebase;
  if (has_taken_over_) RebaseStamps(index_);
}

// Rows with newer stamps were inserted or touched since the snapshot point, and the latter were
// saved.
void ShardSnapshot::StepThroughIndex(const SignIndex& index, const RowSlabs& slabs,
                                     size_t max_rows) {
  size_t num_passed = 0, num_cold = 0;
  is_read_ = index.ForEachFrom(&next_key_, [&](const SignIndex::Entry& entry) {
    if (num_passed == max_rows || num_cold == kColdRowsAtATime) return false;
    ++num_passed;
    if (entry.stamp > stamp_) return true;
    step_.push_back(entry);
    num_cold += IsColdRow(entry, slabs);
    return true;
  });
}

// A row that was made since the cut has a newer stamp: what had the key at the cut was saved when
// it went, or there was nothing.
void ShardSnapshot::StepThroughKeys(const SignIndex& index, const RowSlabs& slabs,
                                    size_t max_rows) {
  const size_t end = std::min(keys_.size(), position_ + max_rows);
  size_t num_cold = 0;
  for (size_t i = position_; i < end; ++i) Touch(index.HomeOf(keys_[i]));
  for (; position_ < end && num_cold < kColdRowsAtATime; ++position_) {
    const SignIndex::Entry* entry = index.Find(keys_[position_]);
    if (entry != nullptr && entry->stamp <= stamp_) {
      step_.push_back(*entry);
      num_cold += IsColdRow(*entry, slabs);
    } else {
      removed_.push_back(keys_[position_]);
    }
  }
  is_read_ = position_ == keys_.size();
  if (!is_read_) next_key_ = keys_[position_];
}

bool ShardSnapshot::Read(const SignIndex& live_index, const RowSlabs& live_slabs, size_t max_rows,
                         RowRecords* rows) {
  if (is_read_) return false;
  const SignIndex& index = has_taken_over_ ? index_ : live_index;
  const RowSlabs& slabs = has_taken_over_ ? slabs_ : live_slabs;
  step_.clear();
  removed_.clear();
  changes_ == nullptr ? StepThroughIndex(index, slabs, max_rows)
                      : StepThroughKeys(index, slabs, max_rows);
  // Those that were saved come with TakeSaved(), as they were at the snapshot point.
  {
    const std::lock_guard lock(mutex_);
    if (!saved_keys_.empty()) {
      std::erase_if(step_, [&](const auto& entry) { return saved_keys_.count(entry.key) != 0; });
      std::erase_if(removed_, [&](uint64_t key) { return saved_keys_.count(key) != 0; });
    }
  }
  // All misses at once, before rows are copied one after another: the shard is locked.
  for (const SignIndex::Entry& entry : step_) {
    const RowShape& shape = slabs.shape(entry.cell);
    TouchRow(slabs.values(entry.cell), size_t{shape.embedding_floats()} + shape.state_floats);
  }
  std::vector<float> copy;
  for (const SignIndex::Entry& entry : step_) {
    const auto [head, values] = RowOf(entry, slabs, &copy);
    if (values != nullptr) rows->Add(head, values);
  }
  for (const uint64_t key : removed_) rows->AddRemoval(SignOfKey(key));
  // Only what was taken over; the shard's own are not touched.
  if (is_read_) {
    index_.Clear();
    slabs_.Clear();
  }
  return !is_read_;
}

}  // namespace persia::store

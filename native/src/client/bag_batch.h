// BagBatch: what EmbeddingBags knows of one batch, feature group by feature group.
//
// Between lookup and update it remembers which rows the batch touched and which bags they are in.
// Batches are used again: their arrays only grow, so that in a steady state nothing is allocated.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "store/in_place_rows.h"
#include "worker/bags.h"
#include "worker/slot_table.h"
#include "worker/unique_keys.h"

namespace persia::client {

// A vector whose memory is kept and not cleared between uses.
template <typename T>
class Reused {
 public:
  std::span<T> Resize(size_t size) {
    if (values_.size() < size) values_.resize(size + size / 4);
    used_ = {values_.data(), size};
    return used_;
  }
  std::span<T> span() const { return used_; }

 private:
  std::vector<T> values_;
  std::span<T> used_;
};

// One slot's part of the batch.
struct SlotInput {
  const worker::SlotConfig* slot = nullptr;
  std::span<const uint64_t> ids;
  std::span<const int64_t> lengths;
  bool has_one_each = false;
  std::span<const float> weights = {};  // one an ID; empty: all 1
  size_t column = 0;
};

// The slots of one feature group, which share rows.
class GroupBatch {
 public:
  // Deduplicates the slots' signs; `keys` is the thread's.
  void Plan(std::span<const SlotInput> inputs, const worker::SlotTable& slots,
            worker::UniqueKeys* keys);

  // Whether every sample has exactly one ID, without a weight, of a slot that shares its rows with
  // no other: then several groups are handled together.
  bool IsSingle() const;
  size_t column() const { return slots_[0].column; }  // of the first slot
  // Of a single-valued group: its number for each sample.
  std::span<const uint32_t> numbers() const { return slots_[0].bags.numbers; }

  // Writes all samples of the group's slots into their columns of the output; of a store whose rows
  // are in that format.
  void Pool(const store::RowFormat& format, float* out, size_t stride) const;
  // Fills `sums` with the gradients of the group's signs.
  void BuildSums(const float* gradients, size_t stride, worker::GradientSums* sums) const;

  // Of the group's distinct signs; see in_place_rows.h.
  const store::SignRows& rows() const { return rows_; }
  std::vector<uint32_t>* missing() { return &missing_; }

 private:
  struct Slot {
    size_t column = 0;
    worker::Bags bags;
    Reused<uint32_t> offsets;
    Reused<uint32_t> numbers;
    Reused<float> weights;
  };

  void PlanSlot(const SlotInput& input, const worker::SlotTable& slots, worker::UniqueKeys* keys,
                Slot* planned);

  std::vector<Slot> slots_;
  Reused<uint64_t> signs_;
  Reused<store::RowHandle> handles_;
  Reused<const float*> values_;
  store::SignRows rows_;
  std::vector<uint32_t> missing_;
};

class BagBatch {
 public:
  uint32_t batch_size = 0;
  size_t num_ids = 0;
  bool is_updated = false;
  std::vector<uint64_t> removals;  // see InPlaceRows
  std::vector<GroupBatch> groups;
};

// Batches that came back and wait to be used again. More than these are in flight only where many
// batches are looked up before the first is updated.
// Thread-safe.
class BatchShelf {
 public:
  static std::shared_ptr<BagBatch> Take(const std::shared_ptr<BatchShelf>& shelf) {
    std::unique_ptr<BagBatch> batch = shelf->Pop();
    if (batch == nullptr) batch = std::make_unique<BagBatch>();
    batch->is_updated = false;
    // The shelf lives as long as its batches.
    return {batch.release(), [shelf](BagBatch* back) { shelf->Put(back); }};
  }

 private:
  static constexpr size_t kMaxBatches = 4;

  std::unique_ptr<BagBatch> Pop() {
    const std::lock_guard lock(mutex_);
    if (batches_.empty()) return nullptr;
    std::unique_ptr<BagBatch> batch = std::move(batches_.back());
    batches_.pop_back();
    return batch;
  }
  void Put(BagBatch* back) {
    std::unique_ptr<BagBatch> batch(back);
    const std::lock_guard lock(mutex_);
    if (batches_.size() < kMaxBatches) batches_.push_back(std::move(batch));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<BagBatch>> batches_;
};

}  // namespace persia::client

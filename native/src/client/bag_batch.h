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
#include "store/row_arrays.h"
#include "worker/bags.h"
#include "worker/slot_table.h"
#include "worker/unique_keys.h"

namespace persia::client {

// A vector whose memory is kept and not cleared between uses.
template <typename T>
class Reused {
 public:
  // The elements keep what was in them: the caller writes every one. Views of an earlier size are
  // invalid afterwards. It grows by a quarter more than is needed, so that batches of slightly
  // different sizes soon allocate no more.
  std::span<T> Resize(size_t size) {
    if (values_.size() < size) values_.resize(size + size / 4);
    used_ = {values_.data(), size};
    return used_;
  }
  // Of the size last asked for.
  std::span<T> span() const { return used_; }

 private:
  std::vector<T> values_;
  std::span<T> used_;
};

// One slot's part of the batch.
// Views of the caller's arrays, valid for the lookup that they were passed to. What the update
// needs of them later is copied into the GroupBatch.
struct SlotInput {
  const worker::SlotConfig* slot = nullptr;
  std::span<const uint64_t> ids;
  // How many of the IDs each sample has; checked to be non-negative and to add up.
  std::span<const int64_t> lengths;
  // All lengths are 1: such a slot needs no offsets, and is pooled by a copy.
  bool has_one_each = false;
  std::span<const float> weights = {};  // one an ID; empty: all 1
  // The first of the slot's `dim` columns of the output.
  size_t column = 0;
};
using SlotInputs = std::vector<SlotInput>;  // of one feature group

// The slots of one feature group, which share rows.
// One thread at a time works on a group; different groups of a batch have no row in common, so
// threads share them out. The object is used again for other batches of the same slots.
class GroupBatch {
 public:
  // Deduplicates the slots' signs; `keys` is the thread's.
  // Numbers signs in the order of their first appearance, so that the same batch always gives the
  // same requests. `inputs` is not empty. `array`: where the group's rows are; null: no array.
  void Plan(std::span<const SlotInput> inputs, const worker::SlotTable& slots,
            worker::UniqueKeys* keys, store::RowArray* array);

  // Whether every sample has exactly one ID, without a weight, of a slot that shares its rows with
  // no other: then several groups are handled together.
  static bool IsSingle(std::span<const SlotInput> inputs);
  // Valid after Plan().
  bool IsSingle() const;
  // For runs of groups whose columns are adjacent: of the first slot.
  size_t column() const { return slots_[0].column; }
  // Of a single-valued group: its number for each sample.
  // Of the row in rows() that each sample reads. Only if IsSingle().
  std::span<const uint32_t> numbers() const { return slots_[0].bags.numbers; }

  // Writes all samples of the group's slots into their columns of the output; of a store whose rows
  // are in that format.
  // Requires that each of rows().values is set, to a row or to zeros. Writes every element of the
  // group's columns and no other.
  void Pool(const store::RowFormat& format, float* out, size_t stride) const;
  // Whether some row's gradients are multiplied by a weight or a scaling before they are added.
  bool HasFactors() const;
  // Without factors: adds each bag's gradient to the sums of its rows, by number, dim floats each.
  void AddGradients(const float* gradients, size_t stride, float* sums) const;
  // Fills `sums` with the gradients of the group's signs.
  // `gradients` must stay until the sums have been read: they hold pointers into it.
  void BuildSums(const float* gradients, size_t stride, worker::GradientSums* sums) const;

  // Of the group's distinct signs; see in_place_rows.h.
  // The store fills handles and values in; the batch only owns the memory.
  const store::SignRows& rows() const { return rows_; }
  // Numbers of the signs that had no row when they were looked up.
  std::vector<uint32_t>* missing() { return &missing_; }

 private:
  struct Slot {
    size_t column = 0;
    worker::Bags bags;
    Reused<uint32_t> offsets;
    Reused<uint32_t> numbers;
    Reused<float> weights;
  };

  // Into signs_ and the slots' numbers.
  void NumberSigns(std::span<const SlotInput> inputs, const worker::SlotTable& slots,
                   worker::UniqueKeys* keys);
  void NumberIds(std::span<const SlotInput> inputs, store::RowArray* array);
  // Returns the slot's numbers, which are the caller's to fill in.
  static std::span<uint32_t> PlanSlot(const SlotInput& input, Slot* planned);

  std::span<const Slot> planned() const { return std::span(slots_).first(num_slots_); }

  std::vector<Slot> slots_;
  size_t num_slots_ = 0;  // of slots_, that the present batch has
  Reused<uint64_t> signs_;
  Reused<store::RowHandle> handles_;
  Reused<const float*> values_;
  store::SignRows rows_;
  std::vector<uint32_t> missing_;
};

// Updates the rows of one group, or of single-valued groups whose columns are adjacent.
// `gradients`: the batch's, of all columns; its rows lie `stride` floats apart.
void UpdateGroups(std::span<const GroupBatch> groups, const float* gradients, size_t stride,
                  store::InPlaceRows* store, store::UpdateReport* report);

// Pools slots for inference without numbering their IDs: frequent IDs are found in `recent`, the
// group's, which costs less than a hash table of the batch's distinct IDs. IDs without a row are
// read from `zeros`, as many as the greatest dim. Bits are those of GroupBatch::Pool().
struct UnnumberedPooling {
  const worker::SlotTable& slots;
  const store::InPlaceRows& store;
  uint64_t num_removals;  // the store's
  const store::RowFormat& format;
  const float* zeros;
  float* out;  // of the first slot and sample
  size_t stride;

  void Pool(const SlotInput& input, store::RecentRows* recent) const;
  // Of groups for which GroupBatch::IsSingle() holds and whose columns are adjacent; `recent` has
  // one element for each.
  void PoolSingle(std::span<const SlotInputs> groups, store::RecentRows* recent) const;

 private:
  // Where the rows of the IDs are, or zeros.
  void Find(const worker::SlotConfig& slot, std::span<const uint64_t> ids,
            std::span<const float*> values, store::RecentRows* recent) const;
};

// Belongs to one lookup and the update that follows it. Its holder may drop it without
// an update: then the rows stay as they are.
class BagBatch {
 public:
  uint32_t batch_size = 0;
  size_t num_ids = 0;
  // A second update is refused: the gradients would be applied twice.
  bool is_updated = false;
  // How many rows each shard had removed at the lookup. A shard with more of them at the update may
  // have given a cell to another row, and its handles are looked up again.
  std::vector<uint64_t> removals;  // see InPlaceRows
  // In the order of the collection's groups. Its size never shrinks, so each group keeps its memory
  // from batch to batch.
  std::vector<GroupBatch> groups;
};

// Batches that came back and wait to be used again. More than these are in flight only where many
// batches are looked up before the first is updated.
// Thread-safe.
class BatchShelf {
 public:
  // Never waits: where no batch is on the shelf it makes one. What the batch held before is still
  // in it, and is overwritten by the next lookup.
  static std::shared_ptr<BagBatch> Take(const std::shared_ptr<BatchShelf>& shelf) {
    std::unique_ptr<BagBatch> batch = shelf->Pop();
    if (batch == nullptr) batch = std::make_unique<BagBatch>();
    batch->is_updated = false;
    // The shelf lives as long as its batches.
    return {batch.release(), [shelf](BagBatch* back) { shelf->Put(back); }};
  }

 private:
  // A training loop has one in flight and a pipelined one a few. More would only keep memory.
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

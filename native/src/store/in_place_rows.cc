#include "store/in_place_rows.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "simd/kernels.h"
#include "store/probe_in_blocks.h"

namespace persia::store {
namespace {

constexpr uint32_t kNoCell = RowSlabs::kNoCell;
// Keys whose places in the index are brought into the cache together.
constexpr size_t kInsertBlock = 256;

uint64_t KeyOf(const MissingRow& missing) { return SignKey(missing.rows->signs[missing.index]); }

// Which limit to raise: evicting rows of the batch itself would leave the caller with dangling
// pointers.
Status NoRoom(Shard::Room room, uint64_t capacity, uint32_t num_shards) {
  const std::string shards = std::to_string(num_shards) + " internal shards; ";
  if (room == Shard::Room::kGroupIsFull) {
    return ResourceExhausted(
        "a batch has more distinct IDs of a feature group than the group's capacity leaves room "
        "for in each of " +
        shards + "raise the slot's capacity or make batches smaller");
  }
  return ResourceExhausted("a batch has more distinct IDs than there is room for: capacity is " +
                           std::to_string(capacity) + " rows in each of " + shards +
                           "raise the capacity or make batches smaller");
}

}  // namespace

// A training batch begins in every shard: which ones it touches is not known yet.
StatusOr<InPlaceRows> InPlaceRows::Begin(EmbeddingStore& store, LookupMode mode) {
  if (mode == LookupMode::kTrain && !store.shards().IsConfigured()) {
    return FailedPrecondition("a training lookup came before Configure; configure the store first");
  }
  if (store.shards().tier() != nullptr) {
    return FailedPrecondition("rows of a store with a tier move, and cannot be used in place");
  }
  InPlaceRows rows(&store.shards());
  if (mode == LookupMode::kTrain) {
    for (size_t i = 0; i < rows.shards_.size(); ++i) {
      Shard& shard = rows.store_->all()[i];
      shard.BeginBatch();
      rows.shards_[i].now = shard.table().now();
    }
  }
  return rows;
}

// Rows may have been removed since their lookup. Only in shards where some were, rows are found
// anew.
InPlaceRows InPlaceRows::BeginUpdate(EmbeddingStore& store, std::span<const uint64_t> removals) {
  InPlaceRows rows(&store.shards());
  ++rows.store_->features().num_updates;
  for (size_t i = 0; i < removals.size(); ++i) {
    rows.shards_[i].has_removed = rows.store_->all()[i].table().num_removals() != removals[i];
  }
  return rows;
}

InPlaceRows::InPlaceRows(ShardSet* store) : store_(store), lock_(store->LockForChange()) {
  // Index and slabs of a shard stay where they are as long as the shard does.
  for (Shard& shard : store->all()) {
    const ShardTable& table = shard.table();
    ShardSnapshot* snapshot = shard.features().snapshot;
    shards_.push_back({&table.index(), &table.slabs(), table.now(), false, snapshot});
    has_snapshot_ |= snapshot != nullptr;
  }
}

// Like Shard's pass over existing rows, but over signs of all shards in the caller's order: threads
// divide feature groups and not shards, and touch different rows.
void InPlaceRows::Find(const SignRows& rows, const float* zeros,
                       std::vector<uint32_t>* missing) const {
  if (rows.signs.empty()) return;
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  // Rows themselves are not read here: the kernels that read them ask for them ahead.
  size_t row_floats = 0;
  if (has_snapshot_) {  // to be saved, a row is wanted with its state
    const RowPolicies& policies = *store_->all()[0].table().policies();
    row_floats = policies.Of(rows.signs[0]).ShapeFor(rows.dim).Stride();
  }
  ProbeInBlocks(
      rows.signs.size(), row_floats,
      [&](size_t i) {
        const uint64_t key = SignKey(rows.signs[i]);
        rows.handles[i].shard = ShardOfKey(key, num_shards);
        return std::pair(key, shards_[rows.handles[i].shard].index);
      },
      [&](size_t i, const SignIndex::Entry* entry) {
        const RowSlabs& slabs = *shards_[rows.handles[i].shard].slabs;
        return slabs.dim(entry->cell) == rows.dim ? slabs.values(entry->cell) : nullptr;
      },
      [&](size_t i, SignIndex::Entry* entry, const float* row) {
        if (row == nullptr) {
          rows.handles[i].cell = kNoCell;
          rows.values[i] = zeros;
          missing->push_back(static_cast<uint32_t>(i));
          return;
        }
        rows.handles[i].cell = entry->cell;
        rows.values[i] = row;
        const ShardView& shard = shards_[rows.handles[i].shard];
        if (shard.snapshot != nullptr) [[unlikely]] {
          shard.snapshot->SaveBeforeTouch(*entry, *shard.slabs);
        }
        entry->stamp = shard.now;
      });
}

// States are asked for ahead: numbering has read more of them than the nearest cache holds. Values
// are the same before and after a row is inserted.
void InPlaceRows::FindInArray(RowArray* array, const SignRows& rows,
                              std::vector<uint32_t>* missing) const {
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  constexpr size_t kAhead = 24;
  for (size_t i = 0; i < rows.signs.size(); ++i) {
    if (i + kAhead < rows.signs.size()) {
      __builtin_prefetch(&array->IdStateOf(array->IdOf(rows.signs[i + kAhead])), 0, 1);
    }
    const uint64_t key = SignKey(rows.signs[i]), id = array->IdOf(rows.signs[i]);
    RowArray::IdState& state = array->IdStateOf(id);
    rows.handles[i] = {ShardOfKey(key, num_shards), array->CellOf(id)};
    rows.values[i] = array->values(id);
    if ((state.number & RowArray::kHasRow) == 0) [[unlikely]] {
      array->CountIdState(id);
      rows.handles[i].cell = kNoCell;
      missing->push_back(static_cast<uint32_t>(i));
      continue;
    }
    const ShardView& shard = shards_[rows.handles[i].shard];
    if (shard.snapshot != nullptr) [[unlikely]] {
      shard.snapshot->SaveBeforeTouch(*shard.index->Find(key), *shard.slabs);
    }
    state.stamp = shard.now;
  }
}

// A block's index lines are asked for, then the next block is looked for among the recent rows
// while they are on their way: the reads of some hundred keys overlap.
void InPlaceRows::FindForReading(const SignRows& rows, const float* zeros,
                                 RecentRows* recent) const {
  std::array<ReadBlock, 2> blocks;
  for (size_t begin = 0, n = 0; begin < rows.signs.size(); begin += kReadBlock, ++n) {
    BeginReading(rows, begin, recent, &blocks[n % 2]);
    if (n > 0) EndReading(rows, zeros, recent, &blocks[(n - 1) % 2]);
  }
  const size_t num_blocks = (rows.signs.size() + kReadBlock - 1) / kReadBlock;
  if (num_blocks > 0) EndReading(rows, zeros, recent, &blocks[(num_blocks - 1) % 2]);
}

void InPlaceRows::BeginReading(const SignRows& rows, size_t begin, RecentRows* recent,
                               ReadBlock* block) const {
  const size_t size = std::min(kReadBlock, rows.signs.size() - begin);
  std::array<uint64_t, kReadBlock> keys;
  simd::ActiveKernels().make_keys(keys.data(), rows.signs.data() + begin, size);
  // The recent rows are more than the first-level cache holds.
  for (size_t i = 0; i < size; ++i) __builtin_prefetch(&recent->Of(keys[i]));
  size_t count = 0;
  for (size_t i = 0; i < size; ++i) {
    const RecentRows::Row& row = recent->Of(keys[i]);
    rows.values[begin + i] = row.values;
    block->keys[count] = keys[i];
    block->numbers[count] = static_cast<uint32_t>(begin + i);
    // Without a branch, which would be mispredicted for a third of the keys.
    count += static_cast<size_t>(row.key != keys[i]);
  }
  block->count = count;
  recent->CountMisses(count);
  for (size_t i = 0; i < count; ++i) {
    block->entries[i] = ShardOf(block->keys[i]).index->HomeOf(block->keys[i]);
    __builtin_prefetch(block->entries[i]);
  }
}

// The kernels that read the rows ask for them ahead.
void InPlaceRows::EndReading(const SignRows& rows, const float* zeros, RecentRows* recent,
                             ReadBlock* block) const {
  for (size_t i = 0; i < block->count; ++i) {
    block->entries[i] = SignIndex::SkipHome(block->entries[i], block->keys[i]);
    __builtin_prefetch(block->entries[i]);
  }
  for (size_t i = 0; i < block->count; ++i) {
    const uint64_t key = block->keys[i];
    const SignIndex::Entry* entry = SignIndex::FindFrom(block->entries[i], key);
    const RowSlabs& slabs = *ShardOf(key).slabs;
    const bool has_row = entry != nullptr && slabs.dim(entry->cell) == rows.dim;
    const float* row = has_row ? slabs.values(entry->cell) : zeros;
    rows.values[block->numbers[i]] = row;
    // Not without a row: the sign may get one before the next lookup.
    if (has_row) recent->Of(key) = {key, row};
  }
}

Status InPlaceRows::Insert(uint32_t shard_number, std::span<const MissingRow> missing,
                           LookupReport* report) {
  Shard& shard = store_->all()[shard_number];
  ShardTable& table = shard.table();
  Status status;
  std::vector<MissingRow> admitted;
  std::vector<uint64_t> keys;
  admitted.reserve(missing.size());
  keys.reserve(missing.size());
  // Admission first, for all: what is refused needs no room.
  for (size_t begin = 0; begin < missing.size(); begin += kInsertBlock) {
    const auto block = missing.subspan(begin, std::min(kInsertBlock, missing.size() - begin));
    for (const MissingRow& row : block) Touch(table.index().HomeOf(KeyOf(row)));
    for (const MissingRow& row : block) {
      if (!shard.Admit(KeyOf(row))) continue;
      RemoveOfAnotherDim(&table, KeyOf(row), row.rows->dim, &status);
      admitted.push_back(row);
      keys.push_back(KeyOf(row));
    }
  }
  report->num_missing += missing.size();
  report->num_unadmitted += missing.size() - admitted.size();
  if (!status.ok()) return status;
  // keep_batch: the caller holds pointers to the batch's rows, so that none may be evicted.
  PERSIA_ASSIGN_OR_RETURN(const Shard::Room room,
                          shard.MakeRoom(keys, /*keep_batch=*/true, report));
  if (room != Shard::Room::kEnough) return NoRoom(room, table.capacity(), num_shards());
  for (const MissingRow& row : admitted) {
    const SignRows& rows = *row.rows;
    const uint32_t cell = shard.Insert(SignKey(rows.signs[row.index]), rows.dim, report);
    if (cell == kNoCell) return OutOfMemory(table);
    rows.handles[row.index].cell = cell;
    rows.values[row.index] = table.slabs().values(cell);
  }
  return Status::Ok();
}

// A counter for each shard, not one for the store: after an eviction only one shard's rows are
// looked for again.
std::vector<uint64_t> InPlaceRows::Removals() const {
  std::vector<uint64_t> removals;
  for (const Shard& shard : store_->all()) removals.push_back(shard.table().num_removals());
  return removals;
}

uint64_t InPlaceRows::NumRemovals() const {
  uint64_t sum = 0;
  for (const Shard& shard : store_->all()) sum += shard.table().num_removals();
  return sum;
}

// Values and scalars in loops of their own: see probe_in_blocks.h.
template <typename Visit>
void InPlaceRows::ForEachLine(const SignRows& rows, Visit visit) const {
  constexpr size_t kLineFloats = 16, kMaxFloats = 256;  // from there the processor follows
  const RowShape shape = store_->all()[0].table().policies()->Of(rows.signs[0]).ShapeFor(rows.dim);
  const size_t row_floats = std::min<size_t>(shape.Stride(), kMaxFloats);
  for (size_t i = 0; i < rows.signs.size(); ++i) {
    if (rows.handles[i].cell == kNoCell) continue;
    for (size_t j = 0; j < row_floats; j += kLineFloats) visit(rows.values[i] + j);
  }
  if (!shape.has_scalar) return;
  for (const RowHandle& handle : rows.handles) {
    if (handle.cell != kNoCell) visit(shards_[handle.shard].slabs->scalar(handle.cell));
  }
}

void InPlaceRows::Locate(const SignRows& rows) {
  const RowPolicies* policies = store_->all()[0].table().policies();
  if (policies == nullptr || rows.signs.empty()) return;  // then there are no rows
  for (size_t i = 0; i < rows.signs.size(); ++i) {
    RowHandle& handle = rows.handles[i];
    const ShardView& shard = shards_[handle.shard];
    if (!shard.has_removed) continue;
    const SignIndex::Entry* entry = shard.index->Find(SignKey(rows.signs[i]));
    const bool has_row = entry != nullptr && shard.slabs->dim(entry->cell) == rows.dim;
    handle.cell = has_row ? entry->cell : kNoCell;
    if (has_row) rows.values[i] = shard.slabs->values(entry->cell);
  }
  // Into the second-level cache, which can wait for more lines at a time than the first one.
  // Update() reads what was dropped.
  ForEachLine(rows, [](const void* line) { __builtin_prefetch(line, 0, 1); });
}

void InPlaceRows::Update(const SignRows& rows, std::span<const float* const> gradients,
                         UpdateReport* report) {
  const RowPolicies* policies = store_->all()[0].table().policies();
  if (policies == nullptr || rows.signs.empty()) return;
  const RowPolicy& policy = policies->Of(rows.signs[0]);
  const RowShape shape = policy.ShapeFor(rows.dim);
  const bool counts_updates = store_->counts_updates();
  // Where the processor has dropped what Locate() asked for, reads of all rows overlap here.
  ForEachLine(rows, [](const void* line) { Touch(line); });
  if (has_snapshot_) [[unlikely]]
    SaveBeforeUpdate(rows);
  // Both gather some tens of rows: for the kernel, and to overlap the misses of the set.
  RowSteps steps(rows.dim, report);
  ChangeBatch changed(store_->features().changes.get());
  for (size_t i = 0; i < rows.signs.size(); ++i) {
    const RowHandle& handle = rows.handles[i];
    if (handle.cell == kNoCell) {
      ++report->num_missing;
      continue;
    }
    changed.Add(SignKey(rows.signs[i]));
    uint32_t* scalar =
        shape.has_scalar ? shards_[handle.shard].slabs->scalar(handle.cell) : nullptr;
    // Find() and Insert() hand out rows for reading; here they are the store's own again.
    auto* values = const_cast<float*>(rows.values[i]);
    steps.Add(policy, {values, values + shape.embedding_floats(), scalar, rows.dim}, gradients[i]);
    if (counts_updates) CountUpdate(values, shape);
  }
  steps.Flush();
}

// By the index entry, whose stamp tells the snapshot whether it needs the row.
void InPlaceRows::SaveBeforeUpdate(const SignRows& rows) const {
  for (size_t i = 0; i < rows.signs.size(); ++i) {
    const RowHandle& handle = rows.handles[i];
    if (handle.cell == kNoCell) continue;
    const ShardView& shard = shards_[handle.shard];
    shard.snapshot->SaveBeforeUpdate(*shard.index->Find(SignKey(rows.signs[i])), *shard.slabs);
  }
}

// To the first shard: totals are reported for the store as a whole.
void InPlaceRows::Count(const LookupReport& lookups, const UpdateReport& updates) {
  store_->all()[0].totals().lookups += lookups;
  store_->all()[0].totals().updates += updates;
}

}  // namespace persia::store

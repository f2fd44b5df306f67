// InPlaceRows: a batch's rows, used where they lie in the store.
//
// For a caller in this process that handles a whole batch at once: rows are neither copied out nor
// looked for a second time when their gradients come. A batch is
//   1. Begin(), then Find() of the signs of each feature group, then Insert() of the missing ones,
//      shard by shard; Count(); Removals(), to be kept with the handles;
//   2. the caller pools the rows that `values` point to, and lets the object go;
//   3. BeginUpdate() with the removals, then Locate() and Update() of some tens of rows at a time.
//
// While an object of this class lives, it has the store's lock exclusively, and no other call gets
// into its store: so make it for one batch and let it go, and never make two in one thread. Rows
// are of the store's format in memory (row_format.h), which the caller's kernels have to read.
//
// Threads: each of the methods that take rows may run on several threads at once, each with signs
// of its own, Insert() with a shard of its own. Not two of them at the same time. Threads divide
// feature groups and not shards, so that rows and order of eviction are the same for any number.
//
// A path of its own beside Shard's, where rows are copied under the mutex of each shard in turn:
// here one lock is taken for a batch, and no row is copied. What it does to rows is told to the
// same features (row_features.h). Not with a tier, whose rows move.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/embedding_store.h"
#include "store/row_arrays.h"
#include "store/shard_set.h"

namespace persia::store {

// Where a row was when it was looked up. Rows stay where they are until some are removed:
// Removals() tells whether handles of an earlier batch still hold.
struct RowHandle {
  uint32_t shard;
  uint32_t cell;  // RowSlabs::kNoCell: there is no row
};

// Signs of one dim and one feature group, and what is known of their rows; all spans are equally
// long. One group, so that rows have one policy and one shape, which are looked up once.
struct SignRows {
  uint32_t dim = 0;
  std::span<const uint64_t> signs;
  std::span<RowHandle> handles;
  // Find() and Insert(): where the row's embedding lies, in the store's row format. Valid while the
  // object lives; Locate() finds it again for a later one.
  std::span<const float*> values;
};

// A sign that Find() did not find: number `index` of *rows.
struct MissingRow {
  const SignRows* rows;
  uint32_t index;
};

// Rows that lookups found recently: a direct-mapped cache of frequent keys. A frequent row is then
// found here, in a nearby cache, and not in the index, whose lines are spread over as many pages as
// it has: there the translation of the address takes longer than all else.
//
// Keeps rows between lookups until a row is removed. Grows while lookups miss many keys, so
// small vocabularies take little memory if their IDs have rows. Not thread-safe. For one store, one
// feature group and dim.
class RecentRows {
 public:
  struct Row {
    uint64_t key;
    const float* values;
  };

  // Before a lookup of so many signs. Forgets all rows if `num_removals`, the store's, has changed.
  void Begin(size_t num_signs, uint64_t num_removals) {
    size_t size = std::bit_ceil(std::clamp<size_t>(num_signs / 8, 16, kMinLimit));
    if (num_removals == num_removals_ && rows_.size() >= size) {
      const size_t limit = std::clamp(std::bit_floor(num_signs / 4), kMinLimit, kMaxLimit);
      if (num_misses_ <= 2 * rows_.size() || rows_.size() >= limit) return;
      size = 2 * rows_.size();
    }
    rows_.assign(size, {0, nullptr});
    rows_[0].key = UINT64_MAX;  // any key of another place; the others' places are not that of 0
    num_removals_ = num_removals;
    num_misses_ = 0;
  }
  Row& Of(uint64_t key) { return rows_[key & (rows_.size() - 1)]; }
  void CountMisses(size_t count) { num_misses_ += count; }

 private:
  // Of a group, 64 KiB; and 256 KiB for lookups that read most of it several times. Larger caches
  // save fewer searches than their own misses cost.
  static constexpr size_t kMinLimit = 4096, kMaxLimit = 16384;

  std::vector<Row> rows_;  // a power of two
  uint64_t num_removals_ = 0;
  size_t num_misses_ = 0;  // since it forgot all rows
};

class InPlaceRows {
 public:
  // Waits until the calls in progress have ended, and while a snapshot's memory is full.
  // kFailedPrecondition: a training batch on a store that is not configured, or the store has a
  // tier.
  static StatusOr<InPlaceRows> Begin(EmbeddingStore& store, LookupMode mode);
  // For the rows of an earlier lookup; `removals` is what Removals() was at its end. Counts as one
  // Update() call of the store.
  static InPlaceRows BeginUpdate(EmbeddingStore& store, std::span<const uint64_t> removals);

  // The array of a feature group, by the sign of any ID; null: it has none.
  RowArray* ArrayOf(uint64_t sign) const { return store_->arrays().OfSign(sign); }

  // Training: rows that are found become the newest. The numbers of the signs that have no row are
  // appended to *missing; their values are `zeros`, their handles lead to no row.
  void Find(const SignRows& rows, const float* zeros, std::vector<uint32_t>* missing) const;

  // The same for signs of an array.
  void FindInArray(RowArray* array, const SignRows& rows, std::vector<uint32_t>* missing) const;

  // Inference: only finds where the rows are. Signs may repeat; the handles may be empty. `recent`
  // is that of earlier calls for the same lookup and dim.
  void FindForReading(const SignRows& rows, const float* zeros, RecentRows* recent) const;

  uint32_t num_shards() const { return store_->count(); }
  uint32_t ShardOf(const MissingRow& missing) const {
    return missing.rows->handles[missing.index].shard;
  }
  // Training. Gives rows to those of the signs, all of `shard`, that are admitted; the others keep
  // what Find() gave them. kResourceExhausted: no memory; or the batch alone has more rows than the
  // shard's share of the capacity: then nothing is inserted here, but other shards may have taken
  // their part of the batch and given up older rows for it.
  Status Insert(uint32_t shard, std::span<const MissingRow> missing, LookupReport* report);

  // The sum of Removals().
  uint64_t NumRemovals() const;
  // How many rows each shard has removed so far: tells a later BeginUpdate() whether rows may have
  // gone since.
  std::vector<uint64_t> Removals() const;

  // To be called before Update(), for some tens of rows: brings their memory into the cache, and
  // looks for those again that may have gone or moved.
  void Locate(const SignRows& rows);
  // As EmbeddingStore::Update, for rows that Locate() was called for; gradients[i] is for signs[i].
  void Update(const SignRows& rows, std::span<const float* const> gradients, UpdateReport* report);

  // Adds to the totals of EmbeddingStore::stats(), once for all threads.
  void Count(const LookupReport& lookups, const UpdateReport& updates);

 private:
  explicit InPlaceRows(ShardSet* store);
  // visit(address) for each cache line of the rows and their scalars, up to a point.
  template <typename Visit>
  void ForEachLine(const SignRows& rows, Visit visit) const;
  // For a snapshot. The handles must be located.
  void SaveBeforeUpdate(const SignRows& rows) const;

  ShardSet* store_;
  // What is wanted of each shard for each row, side by side: a shard is several cache lines.
  struct ShardView {
    const SignIndex* index;
    const RowSlabs* slabs;
    uint32_t now;
    bool has_removed;  // since the lookup whose rows are updated
    ShardSnapshot* snapshot;
  };

  const ShardView& ShardOf(uint64_t key) const {
    return shards_[ShardOfKey(key, static_cast<uint32_t>(shards_.size()))];
  }

  // FindForReading() in steps. So many signs are looked for among the recent rows; those that are
  // not there, `count`, are on their way from the index.
  static constexpr size_t kReadBlock = 256;
  struct ReadBlock {
    size_t count;
    std::array<uint64_t, kReadBlock> keys;
    std::array<uint32_t, kReadBlock> numbers;
    std::array<SignIndex::Entry*, kReadBlock> entries;  // how far the search has come
  };
  void BeginReading(const SignRows& rows, size_t begin, RecentRows* recent, ReadBlock* block) const;
  void EndReading(const SignRows& rows, const float* zeros, RecentRows* recent,
                  ReadBlock* block) const;

  std::vector<ShardView> shards_;
  bool has_snapshot_ = false;
  std::unique_lock<WriterFirstMutex> lock_;
};

}  // namespace persia::store

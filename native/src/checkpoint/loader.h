// Loader: brings blocks of checkpoint files into a store, or the changes of a packet into one that
// follows another store.
//
// All rows of a checkpoint: Begin(), Verify() of every chunk of every file, Replace(), Add() of
// every chunk, Commit(). All is verified before anything is removed: a damaged file leaves the
// store as it was. Without Replace() the rows are added to those of the store. Changes: Begin()
// with the packet's kind, Prepare() of every chunk, Apply(), Commit(). Lookups see all of a packet
// or nothing of it.
//
// Chunks are whole blocks, one behind the other, in any order; the caller keeps their bytes until
// the call returns. Every server reads whole files: rows that belong to other servers are skipped
// and counted, so that a checkpoint may be loaded by another number of servers than wrote it.
//
// Thread-safe: chunks may be given by several threads at once, which is how a load uses many
// processors. The store must outlive it, and cannot be snapshotted or loaded otherwise meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "base/status.h"
#include "base/train_config.h"
#include "checkpoint/block.h"
#include "checkpoint/file_format.h"
#include "checkpoint/snapshot.h"
#include "store/embedding_store.h"
#include "store/row_policy.h"
#include "store/store_load.h"

namespace persia::checkpoint {

class Loader {
 public:
  struct Options {
    // Of the checkpoint: what its rows' state means. A script's config knows nothing of feature
    // groups: where it has none, those that the store is configured with hold.
    TrainConfig config = {};
    FileKind kind = FileKind::kRows;  // of the files; whether Add() or Prepare() takes the chunks
    // Without: the rows get none, and the store is for inference alone. It has no limits then but
    // its own: no capacities of groups, no times to live, no least norms.
    bool with_state = true;
    // Every row gets the state of a new one, whatever comes with it: of another optimizer, or none.
    bool fresh_state = false;
    Replica replica = {};  // which of the rows are this store's
  };

  // Occupies the store as StoreLoad::Begin does, until this is destroyed. Also refuses a train
  // config that is not valid, and, of all rows, one that the store cannot be configured with
  // (kInvalidArgument).
  static StatusOr<std::unique_ptr<Loader>> Begin(store::EmbeddingStore& store,
                                                 const Options& options);

  // Checks all blocks of the chunk, decompressed, and changes nothing. Returns the number of their
  // rows, those of other servers included, for the caller to compare with the files' footers.
  // kCorruption: the bytes are damaged; kInvalidArgument: the rows are of another optimizer.
  StatusOr<uint64_t> Verify(std::span<const std::byte> chunk);
  // Removes all rows and configures the store as the checkpoint says, with room for what was
  // verified: an index that grows step by step would be copied time and again.
  Status Replace();
  // Verifies, and adds the rows; returns how many of them are this server's. A sign that has a row
  // gets the new one in its place. Blocks before a wrong one have been added already.
  // kFailedPrecondition: the store is not configured, or otherwise; kResourceExhausted: no memory.
  StatusOr<uint64_t> Add(std::span<const std::byte> chunk);
  // Verifies all blocks of a chunk of changes, and keeps what is in them for Apply(); of a chunk
  // with an error nothing is kept. Returns the number of its rows and removals. As Add() otherwise.
  StatusOr<uint64_t> Prepare(std::span<const std::byte> chunk);
  // Changes the store by all that is prepared, in one step: a lookup of a batch sees all of it or
  // nothing, and waits meanwhile. Returns the number of rows and removals. May be called again
  // after more was prepared; of changes from nothing, the first call removes all rows.
  StatusOr<uint64_t> Apply();
  // After the last Add() or Apply(): removes what is beyond the capacity.
  void Commit() { rows_->Finish(); }

  uint64_t num_rows() const { return num_rows_.load(); }
  uint64_t num_foreign() const { return num_foreign_.load(); }
  uint64_t num_evicted() const { return rows_->num_evicted(); }

 private:
  Loader(store::EmbeddingStore& store, const Options& options,
         std::unique_ptr<store::StoreLoad> rows);

  // Decodes and checks block after block, and calls visit(rows), which may move from them. Stops at
  // the first error.
  template <typename Visit>
  Status ForEachBlock(std::span<const std::byte> chunk, Visit visit) const;
  Status Check(const BlockRows& rows) const;
  Status CheckKind(bool is_of_changes) const;
  bool IsForeign(const BlockRows& rows) const;
  store::LoadedRows RowsOf(const BlockRows& rows) const;
  Status CheckStore(const BlockRows& rows, const std::optional<TrainConfig>& of_store) const;
  TrainConfig StoreConfig() const;

  store::EmbeddingStore& store_;
  const Options options_;
  const TrainConfig store_config_;  // how a store of these rows is configured
  const store::RowPolicies rules_;  // of the checkpoint
  const std::unique_ptr<store::StoreLoad> rows_;
  std::mutex mutex_;               // guards what follows, but for the counters
  std::list<BlockRows> prepared_;  // a list: `changes_` points into its elements
  store::Changes changes_;
  bool has_cleared_ = false;
  std::atomic<uint64_t> num_verified_ = 0;  // of this server
  std::atomic<uint64_t> num_rows_ = 0;
  std::atomic<uint64_t> num_foreign_ = 0;
};

}  // namespace persia::checkpoint

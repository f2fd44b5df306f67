// Loader: brings blocks of checkpoint files into a store, or the changes of a packet into one that
// follows another store.
//
// Chunks are whole blocks, one behind the other, in any order. Rows of other servers are skipped
// and counted. Thread-safe; the store must outlive it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
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
    FileKind kind = FileKind::kRows;
    // Without: the rows get none, and the store is for inference alone. It has no limits then but
    // its own: no capacities of groups, no times to live, no least norms.
    bool with_state = true;
    // Every row gets the state of a new one, whatever comes with it: of another optimizer, or none.
    bool fresh_state = false;
    Replica replica = {};
  };

  // As StoreLoad::Begin; refuses a train config that is not valid, and, of all rows, one that the
  // store cannot be configured with (kInvalidArgument).
  static StatusOr<std::unique_ptr<Loader>> Begin(store::EmbeddingStore& store,
                                                 const Options& options);

  // Checks all blocks of the chunk and changes nothing; the number of their rows. kCorruption;
  // kInvalidArgument: the rows are of another optimizer.
  StatusOr<uint64_t> Verify(std::span<const std::byte> chunk);
  // Removes all rows and configures the store as the checkpoint says, with room for what was
  // verified.
  Status Replace();
  // Verifies, and adds the rows; their number. Blocks before a wrong one have been added already.
  // kFailedPrecondition: the store is configured otherwise.
  StatusOr<uint64_t> Add(std::span<const std::byte> chunk);
  // Of changes. Verifies all blocks of the chunk, and keeps what is in them for Apply(); a chunk
  // with an error is left out. The number of its rows and removals. As Add() otherwise.
  StatusOr<uint64_t> Prepare(std::span<const std::byte> chunk);
  // Changes the store by all that is prepared, in one step: a lookup of a batch sees all of it or
  // nothing. Their number.
  StatusOr<uint64_t> Apply();
  // After the last Add() or Apply(): removes what is beyond the capacity.
  void Commit() { rows_->Finish(); }

  uint64_t num_rows() const { return num_rows_.load(); }
  uint64_t num_foreign() const { return num_foreign_.load(); }
  uint64_t num_evicted() const { return rows_->num_evicted(); }

 private:
  Loader(store::EmbeddingStore& store, const Options& options,
         std::unique_ptr<store::StoreLoad> rows);

  Status Check(const BlockRows& rows) const;
  Status CheckKind(bool is_of_changes) const;
  bool IsForeign(const BlockRows& rows) const;
  store::LoadedRows RowsOf(const BlockRows& rows) const;
  StatusOr<TrainConfig> ConfigOfStore() const;
  Status CheckStore(const BlockRows& rows, const TrainConfig& of_store) const;
  TrainConfig StoreConfig() const;

  store::EmbeddingStore& store_;
  const Options options_;
  const TrainConfig store_config_;  // how a store of these rows is configured
  const store::RowPolicies rules_;  // of the checkpoint
  const std::unique_ptr<store::StoreLoad> rows_;
  std::mutex mutex_;
  std::list<BlockRows> prepared_;  // guarded by it, as those below
  store::Changes changes_;         // in `prepared_`
  bool has_cleared_ = false;
  std::atomic<uint64_t> num_verified_ = 0;  // of this server
  std::atomic<uint64_t> num_rows_ = 0;
  std::atomic<uint64_t> num_foreign_ = 0;
};

}  // namespace persia::checkpoint

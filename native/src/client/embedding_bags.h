// EmbeddingBags: pooled lookups and updates of a store in this process, without servers, messages
// or copies of rows.
//
// The engine of persia.nn.EmbeddingBagCollection. It plans a batch like an embedding worker does
// (slot_table.h, unique_keys.h, bags.h) and touches the store's rows where they lie
// (in_place_rows.h). Feature groups are divided among the threads of a pool: their signs are
// disjoint. Neither bits nor order of eviction depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "base/train_config.h"
#include "store/embedding_store.h"
#include "worker/slot_config.h"

namespace persia::client {

struct EmbeddingBagsOptions {
  std::vector<worker::SlotConfig> slots;  // pooled ones only; output columns follow their order
  uint32_t feature_index_prefix_bit = 8;
  store::EmbeddingStore::Options store;
  uint32_t num_threads = 1;
};

// A batch that was looked up for training, until its gradient comes.
class BagBatch;
using BagBatchPtr = std::shared_ptr<BagBatch>;

struct PooledBags {
  Buffer rows;  // float32 [batch_size, num_columns]
  uint32_t batch_size = 0;
  BagBatchPtr batch;  // null after a lookup for inference
};

// Thread-safe: batches are handled one after the other.
class EmbeddingBags {
 public:
  // kInvalidArgument: as SlotTable and EmbeddingStore refuse; a raw slot; no threads.
  static StatusOr<std::unique_ptr<EmbeddingBags>> Create(EmbeddingBagsOptions options);
  ~EmbeddingBags();

  uint32_t num_slots() const;
  uint32_t num_columns() const;  // sum of the slots' dims

  Status Configure(const TrainConfig& config, bool replace);

  // `values`: the IDs, slot after slot, sample after sample. `lengths`: [num_slots, batch_size],
  // how many of them each bag has. kInvalidArgument names the slot and sample of a negative length,
  // or says that the lengths do not add up to the values. `weights`: one a value, finite, or none
  // for all 1. kResourceExhausted: see InPlaceRows::Insert.
  StatusOr<PooledBags> Lookup(std::span<const uint64_t> values, std::span<const int64_t> lengths,
                              store::LookupMode mode, std::span<const float> weights = {});
  // `gradients`: [batch_size, num_columns]. Applies the optimizer once to each row of the batch.
  // kFailedPrecondition: the batch has been updated already.
  StatusOr<store::UpdateReport> Update(BagBatch& batch, std::span<const float> gradients);

  // Of whole slots, by their position. `rows`: [ids.size(), dim]; an ID is one of the slot's
  // values.
  Status SetRows(uint32_t slot, std::span<const uint64_t> ids, std::span<const float> rows);

  store::StoreStats stats() const;
  // See EmbeddingStore.
  Status NumUpdates(std::span<const uint64_t> signs, std::span<uint32_t> counts) const;
  // For snapshots and loading.
  store::EmbeddingStore& embedding_store();
  void Clear();

 private:
  class Impl;
  explicit EmbeddingBags(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::client

// EmbeddingWorker: from ID features to pooled embeddings,
// and from their gradients to one gradient per sign.
//
// Life of a batch: Register (buffered, bounded) -> Lookup (in flight) -> ReturnGradients or Release
// (gone). A direct lookup starts in flight. References are never reused; a worker's incarnation is
// part of them, so that a restarted worker refuses old ones (kNotFound). Invariant: registered =
// returned + released + expired + buffered + in flight (see stats()).
//
// Thread-safe. Knows no socket: worker/worker_service.h puts it behind RPC, client/ embeds it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/duration_stats.h"
#include "base/status.h"
#include "base/train_config.h"
#include "net/message.h"
#include "worker/row_service.h"
#include "worker/slot_config.h"
#include "worker/slot_stats.h"

namespace persia::worker {

struct WorkerOptions {
  uint32_t replica_index = 0;
  uint32_t feature_index_prefix_bit = 8;  // 1 .. 32
  std::vector<SlotConfig> slots;
  uint64_t forward_buffer_size = 1000;         // waiting batches per loader
  uint64_t forward_buffer_bytes = 4ull << 30;  // waiting ID bytes, all loaders
  uint64_t max_in_flight = 4096;               // batches awaiting gradients
  std::chrono::seconds buffered_data_expired{1000};
};

struct Reference {
  uint64_t incarnation = 0;
  uint64_t counter = 0;
};

struct SlotGradient {
  std::string_view slot;
  bool skipped = false;
  uint32_t num_rows = 0;
  uint32_t dim = 0;
  const float* rows = nullptr;
};

// How old the rows were that one lookup of a batch had found, in updates.
struct LookupStaleness {
  uint32_t parts = 0;  // a bit each, all bits set for all
  uint64_t staleness = 0;
};

struct ReturnReport {
  UpdateResult update;
  uint32_t num_nonfinite_slots = 0;
  uint32_t num_skipped_slots = 0;
  std::vector<LookupStaleness> lookups = {};  // the earliest first; no part is in two
};

struct WorkerStats {
  uint64_t num_registered = 0, num_looked_up = 0, num_returned = 0, num_released = 0,
           num_expired = 0;
  uint64_t num_buffered = 0, num_in_flight = 0;
  uint64_t num_ids = 0, num_signs = 0;  // looked up: before and after deduplication
  uint64_t num_nonfinite_slots = 0, num_skipped_slots = 0;
  // Distinct signs of the batches returned, and those of them that no slot had a usable gradient
  // for; servers have counted all others as updated or missing.
  uint64_t num_gradients = 0, num_gradients_left_out = 0;
  // Distinct signs of batches that servers were told of before their lookup, and those of them that
  // a server was too slow to take in.
  uint64_t num_announced = 0, num_announced_dropped = 0;
  bool configured = false;
};

class EmbeddingWorker {
 public:
  // Refuses (naming the slot): dim 0, no slots, duplicate names, slots
  // of one group with different dims, a hash stack with rounds but no
  // size, a hash stack that does not fit beside the prefix bits.
  static StatusOr<std::unique_ptr<EmbeddingWorker>> Create(WorkerOptions options,
                                                           std::shared_ptr<RowService> rows);
  ~EmbeddingWorker();

  uint64_t incarnation() const;

  // Kept and passed on to all servers; sent again to a
  // server that reports kFailedPrecondition (it restarted).
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline);

  // Decodes (kCorruption, kInvalidArgument name the feature) and buffers. kResourceExhausted: full,
  // try again. An unknown feature name is refused here.
  StatusOr<Reference> Register(uint32_t loader_index, std::span<const std::byte> id_features);

  // The embeddings message. With requires_grad the batch stays in flight until its gradients came
  // back or it is released; a repeated request for a reference in flight is answered again.
  // Without, nothing is inserted and the batch is gone afterwards.
  //
  // Some `parts` of a batch alone need requires_grad. A direct lookup of them is followed by
  // Lookups of the others under the reference that it answers with. Of a part that is looked up
  // again, the later lookup counts.
  StatusOr<net::Parts> Lookup(Reference reference, bool requires_grad, Deadline deadline,
                              LookupParts parts = kAllParts);
  StatusOr<net::Parts> LookupDirect(std::span<const std::byte> id_features, bool requires_grad,
                                    Deadline deadline, LookupParts parts = kAllParts);

  // Applied once: a repetition for a reference that
  // was returned already gives the first report again.
  StatusOr<ReturnReport> ReturnGradients(Reference reference, float scale,
                                         std::span<const SlotGradient> gradients,
                                         Deadline deadline);
  // Ends a batch that will get no gradients. Releasing twice is fine; kNotFound: never registered
  // here; kDeadlineExceeded: a request has worked on it for seconds.
  Status Release(Reference reference);

  // Sets rows by sign (prefix included), each on its server. `rows` holds the signs' rows one after
  // the other, `blocks` says their dims. kInvalidArgument: the counts do not agree.
  Status SetEmbeddings(std::span<const ServerBlocks::Block> blocks, std::span<const uint64_t> signs,
                       std::span<const float> rows, Deadline deadline);
  // Removes all rows of all servers.
  Status Clear(Deadline deadline);
  // Rows per server.
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline);
  WorkerStats stats() const;
  std::vector<SlotStats> slot_stats() const;
  // The phases of this worker's work; as long as it lives.
  std::vector<const DurationStats*> durations() const;

 private:
  class Impl;
  explicit EmbeddingWorker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace persia::worker

// EmbeddingWorker: from ID features to pooled embeddings, and from their gradients to one gradient
// per sign.
//
// Life of a batch: Register (waiting, bounded) -> Lookup (in flight) -> ReturnGradients or Release
// (gone). A direct lookup starts in flight. References are never reused. A worker's incarnation is
// part of a batch's key, so that a restarted worker refuses old ones (kNotFound).
// Invariant: registered = returned + released + expired + waiting + in flight (see metrics()).
//
// Thread-safe. Knows no socket: worker/worker_service.h puts it behind RPC, client/ embeds it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/duration_stats.h"
#include "base/metrics.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "base/train_config.h"
#include "worker/batch_table.h"
#include "worker/embeddings_message.h"
#include "worker/exact_protocol.h"
#include "worker/lookup_plan.h"
#include "worker/reduction.h"
#include "worker/row_service.h"
#include "worker/slot_table.h"
#include "worker/types.h"

namespace persia::worker {

// Bounds of memory. Batches beyond them are refused, never dropped: loaders wait, which is the
// back-pressure.
struct WorkerOptions {
  uint32_t feature_index_prefix_bit = 8;  // 1 .. 32
  std::vector<SlotConfig> slots = {};
  uint64_t forward_buffer_size = 1000;         // waiting batches per loader
  uint64_t forward_buffer_bytes = 4ull << 30;  // waiting ID bytes, all loaders
  uint64_t max_in_flight = 4096;               // batches awaiting gradients
  // A batch of this age is dropped when room is needed: its rank is taken to be gone. It must be
  // longer than a rank may pause, for a checkpoint for instance.
  std::chrono::seconds buffered_data_expired{1000};
};

// Calls block on the servers where they must; each takes a deadline and ends by it. A batch is
// worked on by one call at a time, different batches side by side.
class EmbeddingWorker {
 public:
  // Refuses (naming the slot): dim 0, no slots, duplicate names, slots of one group with different
  // dims, a hash stack with rounds but no size, a hash stack that does not fit beside the prefix
  // bits.
  static StatusOr<std::unique_ptr<EmbeddingWorker>> Create(WorkerOptions options,
                                                           std::shared_ptr<RowService> rows);

  // Random, and part of every key: references of another life of this worker are refused instead of
  // naming another batch.
  uint64_t incarnation() const { return incarnation_; }

  // Keeps the config and passes it on to all servers. Sends it again to a server that reports
  // kFailedPrecondition (it restarted).
  Status Configure(const TrainConfig& config, bool replace, Deadline deadline);

  // Decodes (kCorruption, kInvalidArgument name the feature) and buffers. kResourceExhausted: full,
  // try again. An unknown feature name is refused here.
  // The bytes are copied. Where servers want hints, one call in a few also plans waiting batches
  // and sends their signs ahead, before it returns.
  StatusOr<BatchKey> Register(uint32_t loader_index, std::span<const std::byte> id_features);

  // Returns the embeddings message. With requires_grad the batch stays in flight until its
  // gradients are returned or it is released; a repeated request for a batch in flight is answered
  // again. Without, nothing is inserted and the batch is gone afterwards.
  //
  // Only some `slots` of a batch need requires_grad. A direct lookup of them is followed by
  // Lookups of the others under the key that the message names. Of slots that are looked up again,
  // the later lookup counts. `form`: what the message may have for pooled slots.
  StatusOr<Buffer> Lookup(const BatchKey& key, bool requires_grad, Deadline deadline,
                          SlotMask slots = kAllSlots,
                          EmbeddingsForm form = EmbeddingsForm::kPooled);
  // The batch never waits: its ID features come with the request. Without requires_grad it leaves
  // nothing behind. `original`: the key of the batch at a worker that has died. Servers apply the
  // update under that key, so that it is applied once, whatever the other worker has sent.
  StatusOr<Buffer> LookupDirect(std::span<const std::byte> id_features, bool requires_grad,
                                Deadline deadline, SlotMask slots = kAllSlots,
                                EmbeddingsForm form = EmbeddingsForm::kPooled,
                                const BatchKey& original = {});

  // Whole rows for training, for a rank that replays its updates; the batch is in flight then.
  // kInvalidArgument: bits of wanted signs that do not fit the batch.
  StatusOr<WholeRows> LookupWhole(const LookupWholeRequest& request, Deadline deadline);

  // Applies the gradients once: a repetition for a batch that was returned already gives the first
  // report again.
  // kNotFound: neither held nor returned lately. kFailedPrecondition: the batch was looked up
  // without requires_grad. A server that fails leaves the batch in flight, so that the call can be
  // repeated: servers that have applied their part recognise its key.
  // `after`: a batch of this worker whose update is applied before; see BatchTable::WaitReturned.
  StatusOr<ReturnReport> ReturnGradients(const BatchKey& key, float scale,
                                         std::span<const SlotGradient> gradients, Deadline deadline,
                                         const BatchKey& after = {});
  // Ends a batch that will get no gradients. Releasing twice is fine; kNotFound: never registered
  // here; kDeadlineExceeded: a request has worked on it for seconds.
  Status Release(const BatchKey& key);
  // Ends the batches that wait for their lookup; returns their number. The rank of one may live:
  // its lookup fails with kNotFound, and it looks the batch up directly.
  uint64_t ReleaseWaiting() { return table_.ReleaseWaiting(); }

  // Sets rows by sign (prefix included), each on its server. `rows` holds the signs' rows one after
  // the other. kInvalidArgument: the counts do not agree.
  Status SetEmbeddings(const SignBlocks& blocks, std::span<const float> rows, Deadline deadline);
  // Removes all rows of all servers.
  Status Clear(Deadline deadline) { return rows_->Clear(deadline); }
  // Rows per server.
  StatusOr<std::vector<uint64_t>> Sizes(Deadline deadline) { return rows_->Sizes(deadline); }

  Metrics metrics() const;
  // Of all slots of the config, also those that no batch has had yet.
  std::vector<SlotStats> slot_stats() const { return slot_counters_.stats(); }
  // The phases of this worker's work; as long as it lives.
  std::vector<const DurationStats*> durations() const;

 private:
  EmbeddingWorker(const WorkerOptions& options, SlotTable slots, std::shared_ptr<RowService> rows);

  // Copies the bytes and checks them.
  StatusOr<FeatureBatch> Decode(std::span<const std::byte> id_features) const;
  Status CheckIncarnation(const BatchKey& key) const;
  StatusOr<uint64_t> Add(uint32_t loader_index, std::span<const std::byte> id_features);
  // Makes the plan of a held batch that has none.
  void Plan(Batch& batch);
  // Hints to servers that want it what the next batches will look up.
  // Returns without waiting for a server. Called where a batch has left the queue or joined it, by
  // the thread that did it, so that no thread is needed for it.
  void SendPrefetchHints();
  // Looks the held batch up and pools it.
  StatusOr<Buffer> LookupHeld(Batch& batch, bool requires_grad, Deadline deadline, SlotMask slots,
                              EmbeddingsForm form);
  StatusOr<std::vector<ServerRows>> LookupRows(Batch& batch, bool requires_grad, Deadline deadline,
                                               SlotMask slots);
  StatusOr<WholeRows> LookupWholeHeld(Batch& batch, const LookupWholeRequest& request,
                                      Deadline deadline);
  void CountLookup(const Batch& batch);
  StatusOr<Buffer> Pool(const Batch& batch, std::span<const ServerRows> answers, bool requires_grad,
                        SlotMask slots, EmbeddingsForm form);
  void CountAsRows(const LookupPlan& plan, const EmbeddingsLayout& layout);
  StatusOr<ReturnReport> ReturnHeld(Batch& batch, float scale,
                                    std::span<const SlotGradient> gradients, Deadline deadline,
                                    uint64_t after);
  StatusOr<std::vector<UpdateResult>> Update(const Batch& batch, const ReducedGradients& reduced,
                                             Deadline deadline);
  // Runs `call(placement)`, and again where the servers were replaced meanwhile.
  template <typename Call>
  auto ForPresentServers(Call call) -> decltype(call(Placement()));
  // `num_sent`: signs that servers were sent. Called once for a batch, after the servers have
  // applied its update.
  void Count(const Batch& batch, const ReducedGradients& reduced, uint64_t num_sent);
  // Runs `call`. Where a server says that it is not configured (it has restarted), tells it, and
  // runs `call` once more.
  template <typename Call>
  auto WithConfiguration(Deadline deadline, Call call) -> decltype(call());

  const uint64_t incarnation_ = DrawIncarnation();
  const SlotTable slots_;
  SlotCounters slot_counters_{slots_};
  // Shared with the role that tells it the servers' addresses.
  const std::shared_ptr<RowService> rows_;
  BatchTable table_;
  // Guards config_ alone, and is not held while servers are called.
  // The only mutex of this class: batches have guards (batch_table.h), and counters are atomic. A
  // guard may be held while it is taken, never the other way around.
  mutable std::mutex config_mutex_;
  std::optional<TrainConfig> config_;
  CounterList counters_;
  Counter num_looked_up_{counters_,
                         {"num_looked_up", "persia_batches_looked_up", "Batches looked up."}};
  Counter num_ids_{counters_, {"num_ids", "persia_ids", "IDs of the batches looked up."}};
  Counter num_signs_{counters_,
                     {"num_signs", "persia_unique_ids",
                      "Of these, after each batch's repetitions were left out."}};
  Counter num_nonfinite_slots_{counters_, {"num_nonfinite_slots", nullptr}};
  Counter num_skipped_slots_{counters_, {"num_skipped_slots", nullptr}};
  // Servers count all of these as updated or missing, but for those left out.
  Counter num_gradients_{counters_,
                         {"num_gradients", "persia_gradients",
                          "Unique IDs of the batches whose gradients were applied."}};
  Counter num_gradients_left_out_{counters_,
                                  {"num_gradients_left_out", "persia_gradients_left_out",
                                   "Of these, without a usable gradient: not sent."}};
  Counter num_hinted_{counters_,
                      {"num_hinted", "persia_hinted_ids",
                       "Unique IDs that servers were told of ahead of their lookup."}};
  Counter num_hints_dropped_{counters_,
                             {"num_hints_dropped", "persia_hinted_ids_dropped",
                              "Of these, not sent: servers lagged behind."}};
  Counter num_slots_as_rows_{counters_,
                             {"num_slots_as_rows", "persia_slots_as_rows",
                              "Slots of lookups whose distinct rows were sent, not pooled."}};
  Counter bytes_saved_{counters_,
                       {"embedding_bytes_saved", "persia_embedding_bytes_saved",
                        "Bytes that lookups did not send because of that."}};
  DurationStats register_times_{"register"};
  DurationStats total_times_{"lookup total"};
  DurationStats preprocess_times_{"lookup preprocess"};
  DurationStats rpc_times_{"lookup rpc"};
  DurationStats postprocess_times_{"lookup postprocess"};
  DurationStats update_times_{"update gradient"};
  DurationStats reduce_times_{"update reduce"};
  DurationStats update_rpc_times_{"update rpc"};
};

}  // namespace persia::worker

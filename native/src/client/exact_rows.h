// ExactRows: the rows of a rank's batches in flight, on which the rank replays its own updates
// (consistency="exact", docs/adr/0054).
//
// A batch is looked up ahead of the updates of earlier batches. With one rank, each update that the
// servers lack then is the rank's own. So the rank holds every row of its batches in flight, with
// optimizer state, and steps it with the servers' code as soon as a batch has its gradients.
//
// Life of a batch: Begin -> Arrive -> Pool -> Apply -> PrepareReturn -> Finish, or End without
// gradients. Invariants:
//  * A row that is held has every update that the rank has made: it is pooled, and what a server
//    answers for it is ignored.
//  * A row that is not held has no such update that its server lacks: rows are held until the
//    updates of their batches are acknowledged, and until each lookup has ended that began before.
//  * Rows stay held after that, up to a bound of bytes: the rank is the only one to update them.
//    All are forgotten before rows are set, cleared or loaded. Each lookup asks every server for
//    the incarnation of its rows, which is another one if they have changed otherwise.
//  * Updates are applied in one order, here and on the servers.
//
// Bounded by that and by the batches in flight (held_rows.h, ADR 64). Thread-safe; Pool, Apply and
// EndContext belong to one thread, the loop's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/metrics.h"
#include "base/status.h"
#include "client/held_rows.h"
#include "store/row_policy.h"
#include "worker/embeddings_message.h"
#include "worker/exact_protocol.h"
#include "worker/lookup_plan.h"
#include "worker/reduction.h"
#include "worker/slot_table.h"

namespace persia::client {

class ExactRows {
 public:
  struct Batch;
  using BatchPtr = std::shared_ptr<Batch>;

  // Of rows that no batch in flight needs, as PERSIA_EXACT_ROW_BYTES. Their memory may be half
  // larger, and `spare_bytes`.
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 30;

  // `slots` are those of the job's embedding workers; `served`: those that servers have.
  static StatusOr<std::unique_ptr<ExactRows>> Create(uint32_t feature_index_prefix_bit,
                                                     std::vector<worker::SlotConfig> slots,
                                                     worker::SlotMask served,
                                                     uint64_t max_bytes = kMaxBytes,
                                                     uint64_t spare_bytes = HeldRows::kSpareBytes);

  // The config that the servers have. Call WaitApplied() before they get another one.
  // kFailedPrecondition: as store::CheckReplayable().
  Status Configure(const TrainConfig& config);
  bool HasConfig(const TrainConfig& config) const;

  // Plans a batch and decides which of its rows to ask for: `request` then views the batch. Waits
  // for EndOtherRows(), and for the first lookup after a time without batches.
  StatusOr<BatchPtr> Begin(std::span<const std::byte> id_features,
                           worker::LookupWholeRequest* request, worker::Deadline deadline);
  // Instead of Arrive(): whether the servers' rows are others than those held. The rank has then
  // forgotten its rows, and `request` asks for all of the batch. Only without other batches.
  bool AsksAgain(Batch& batch, const worker::WholeRows& answer,
                 worker::LookupWholeRequest* request);
  // Takes the answer over. The result has the batch's slots, all absent. kFailedPrecondition: a
  // server has restarted while rows are held.
  StatusOr<worker::LookupResult> Arrive(const BatchPtr& batch, uint32_t worker_index,
                                        const worker::WholeRows& answer);
  // Instead of Arrive(): the lookup has failed.
  void Abandon(const BatchPtr& batch);
  // The batch is held by another worker now. Its lookup may have failed at the one before, and
  // follow at the new one.
  void Rename(const worker::BatchReference& from, const worker::BatchReference& to);

  // The embeddings with all updates applied so far. kNotFound: the batch is not held. Another
  // thread may end the batch meanwhile: the embeddings then mean nothing.
  StatusOr<worker::LookupResult> Pool(const worker::BatchReference& reference);
  // Replays the update of the batch; a second call does nothing. Fails as ReduceGradients().
  // kNotFound: the batch is not held, or another thread has ended it meanwhile.
  Status Apply(const worker::BatchReference& reference, float scale,
               std::span<const worker::SlotGradient> gradients);

  struct Outgoing {
    BatchKey after;
    std::vector<worker::SlotGradient> gradients;  // sums where slots permit; in the batch
    BatchPtr batch;
  };
  // What to send for a batch that was applied, once it may be sent. kFailedPrecondition: the batch
  // is not held.
  StatusOr<Outgoing> PrepareReturn(const worker::BatchReference& reference,
                                   std::span<const worker::SlotGradient> gradients,
                                   worker::Deadline deadline);
  // The servers have applied it. kFailedPrecondition: not all of it, so their rows are others.
  Status Finish(const worker::BatchReference& reference, const worker::ReturnReport& report);
  // The update is lost: all calls fail with `status` until no batch is in flight.
  void Fail(const worker::BatchReference& reference, const Status& status);
  // The batch gets no gradients. Does nothing for a name that the batch had at another worker
  // before. kFailedPrecondition: Apply() has its update, which is lost, as with Fail().
  Status End(const worker::BatchReference& reference);
  // Waits until the servers have applied every update that Apply() has.
  Status WaitApplied(worker::Deadline deadline);

  // kFailedPrecondition, naming `what` is refused, while batches are in flight or looked up.
  Status CheckIdle(const char* what) const;
  // The context has ended: no call uses rows any more. Frees their memory once no lookup is under
  // way. Calls fail with kFailedPrecondition from then on, except those that end a batch.
  void EndContext();
  // Between the two, rows may change by other means than updates: none is held, and no lookup
  // begins. Fails as CheckIdle(). Sections may overlap.
  Status BeginOtherRows(const char* what);
  void EndOtherRows();
  Metrics metrics() const;

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // incarnation and reference

  ExactRows(worker::SlotTable slots, worker::SlotMask served, uint64_t max_bytes,
            uint64_t spare_bytes)
      : slots_(std::move(slots)), served_(served), held_(max_bytes, spare_bytes) {}

  static Key KeyOf(const BatchKey& key) { return {key.worker_incarnation, key.reference}; }

  // Locked, all that follow.
  bool IsIdle() const;
  Status CheckIdleLocked(const char* what) const;
  void AddName(const BatchPtr& batch, const worker::BatchReference& name);
  // Asks for the rows of the batch that are not held.
  void Want(Batch& batch, worker::LookupWholeRequest* request);
  bool AreOthers(std::span<const uint64_t> incarnations) const;
  Status CheckServers(const worker::WholeRows& answer);
  // Adds the signs of rows that were not held to `inserted`, even if it fails.
  Status Insert(Batch& batch, const worker::WholeRows& answer, std::vector<uint64_t>* inserted);
  StatusOr<BatchPtr> Find(const worker::BatchReference& reference) const;
  // Find() for a call that uses the batch's rows.
  StatusOr<BatchPtr> FindWithRows(const worker::BatchReference& reference) const;
  void Replay(Batch& batch);
  void EndLocked(const BatchPtr& batch);
  void EndLookup(const Batch& batch);
  // Ends the need of ended batches for their rows, where no lookup needs them any more.
  void Drain();
  // Forgets what was lost, and returns memory that the rows do not use, unless Pool() reads them.
  void FreeMemory();
  uint64_t oldest_in_use() const { return in_use_.empty() ? next_number_ : in_use_.begin()->first; }
  // Of a batch without an answer, or with one that is not right.
  void EndUse(const Batch& batch);

  const worker::SlotTable slots_;
  const worker::SlotMask served_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status status_;  // of an update that was lost
  TrainConfig config_;
  std::shared_ptr<const store::RowPolicies> policies_;  // of it; null: there is none yet
  HeldRows held_;
  std::map<Key, BatchPtr> batches_;              // by each of their names
  std::map<Key, worker::BatchReference> moved_;  // names of before, of batches yet to arrive
  uint32_t num_other_rows_ = 0;                  // sections that have begun and not ended
  uint64_t next_number_ = 1;
  std::set<uint64_t> looking_up_;        // numbers of lookups that have not ended
  std::map<uint64_t, BatchPtr> in_use_;  // batches that need their rows, by number
  bool is_probing_ = false;              // the first lookup after a time without batches
  uint32_t num_pooling_ = 0;             // calls of Pool(), which read rows without the lock
  bool has_ended_ = false;               // the context
  std::deque<std::pair<uint64_t, BatchPtr>> ended_;  // with the first number of later lookups
  uint64_t next_update_ = 1;
  std::map<uint64_t, BatchPtr> unacknowledged_;  // by the order of updates
  std::vector<uint64_t> incarnations_;           // of the servers
  Placement placement_;                          // theirs
  CounterList counters_;
  Counter num_replayed_{counters_,
                        {"num_replayed_rows", "persia_nn_replayed_rows",
                         "Row updates that the rank has replayed (consistency='exact')."}};
  Counter num_fetched_{counters_,
                       {"num_fetched_rows", "persia_nn_fetched_rows",
                        "Rows that lookups brought with their state."}};
  Counter num_spared_{counters_,
                      {"num_spared_rows", "persia_nn_spared_rows",
                       "Rows of lookups that did not travel: the rank held them."}};
  Counter num_compactions_{counters_,
                           {"num_row_compactions", "persia_nn_row_compactions",
                            "Times that the rank has moved its rows, to return memory."}};
};

}  // namespace persia::client

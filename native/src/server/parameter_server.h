// ParameterServer: one embedding store behind RPC. Wire formats: docs/wire_format.md.
//
// The methods of base/row_protocol.h arrive on the RPC server's threads and run concurrently. An
// update carries a BatchKey and is applied once however often it is sent: the server remembers the
// recent keys of each worker, far more of them than a worker can have in flight.
//
// A server that was never started is a store with the same rules in this process: client/ uses
// Lookup(), Update() and SetRows() directly, so that nothing trains differently without a cluster.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/metrics.h"
#include "base/placement.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "net/server.h"
#include "server/inherited_updates.h"
#include "server/operation_log.h"
#include "server/row_gathering.h"
#include "server/row_transfer.h"
#include "server/shard_loads.h"
#include "server/standby_link.h"
#include "server/update_deduplicator.h"
#include "store/embedding_store.h"

namespace persia::server {

class ParameterServer {
 public:
  struct Options {
    // The server's place among the job's servers. It does not choose rows: workers route signs, and
    // the server keeps whatever it is sent.
    uint32_t replica_index = 0;
    uint32_t replica_size = 1;
    // Of the servers, where this one has restarted; one with sources is told with its rows.
    std::vector<MovedShard> moved_shards = {};
    store::EmbeddingStore::Options store = {};
    std::optional<store::TierOptions> tier = {};  // without one, rows are in memory alone
    net::ServerOptions rpc = {};
    // For inference: what would change rows is refused (kFailedPrecondition), and everything
    // (kUnavailable) until MarkLoaded.
    bool read_only = false;
    // Not 0: a standby may be attached, and changes are applied one at a time, see StandbyLink.
    std::chrono::milliseconds standby_deadline{0};
    // Begins as the standby of another server: everything else is refused (kUnavailable) until
    // TakeOver().
    bool is_standby = false;
    // Not 0: begins without rows, gathers them from so many servers, and refuses everything else
    // (kUnavailable) until Serve(). See RowTransfer.
    uint32_t num_sources = 0;
  };

  // Draws the incarnation. Refuses replica_index >= replica_size and what the store refuses. With a
  // tier it returns when all rows of its file are recovered.
  static StatusOr<std::unique_ptr<ParameterServer>> Create(const Options& options);

  // See net::Server.
  // Rows may be looked up as soon as it returns, and trained once a worker has configured the
  // server.
  StatusOr<uint16_t> Start(const std::string& host = "127.0.0.1", uint16_t port = 0) {
    return rpc_.Start(host, port);
  }
  // The store stays, with its rows: a snapshot may still be written.
  void Stop(std::chrono::milliseconds timeout) { rpc_.Stop(timeout); }
  // A read-only server answers from now on. Of others nothing changes.
  // Once, when the rows of the checkpoint are there. Never taken back: a newer version is loaded
  // into another server.
  void MarkLoaded() { loaded_ = true; }

  // Applies what the primary has sent, and answers from now on. Fails as OperationLog::TakeOver().
  // For a server made with `is_standby`.
  Status TakeOver(bool primary_has_ended);
  // Null for a server that began as a primary.
  OperationLog* log() { return log_.get(); }
  // The link to this server's own standby; null without `standby_deadline`.
  StandbyLink* standby() { return standby_.get(); }

  // Sends the rows to the servers that replace this one and its like. `transfer`: its targets and
  // their placement.
  // kFailedPrecondition: with what the server has, it cannot be replaced so; nothing has begun.
  Status BeginTransfer(const RowTransfer::Options& transfer);
  // As far as its options and its config are concerned.
  Status CheckTransferable() const;
  // Answers nothing any more, and sends what has changed last. Where it fails, and after it too,
  // Resume() undoes it.
  Status HandOver();
  // Gives the transfer up: answers again, with all rows.
  void Resume();
  // Nothing: there is no transfer.
  std::optional<RowTransfer::Progress> transfer_progress() const;
  bool has_handed_over() const { return refusal_ == Refusal::kHandedOver; }
  // Of a server with `num_sources`: answers from now on. kFailedPrecondition: rows are missing.
  Status Serve();
  // The placement of this server and its like. With `num_sources` only once it serves.
  Placement placement() const {
    return gathering_ == nullptr ? placement_ : gathering_->placement();
  }
  // Rows looked up lately by virtual shard: a sample.
  std::vector<uint64_t> shard_loads() const { return shard_loads_.counts(); }
  bool was_sent_rows() const { return gathering_ != nullptr && gathering_->has_begun(); }

  // The answer owns copies of the rows: they may change or be evicted before it is sent.
  // The rows are copied under the locks of their shards, so no row is torn; rows of one batch may
  // come from before and after another batch's update, as in any asynchronous training.
  // kFailedPrecondition: a lookup for training before the config.
  StatusOr<ServerRows> Lookup(const LookupRowsRequest& request);
  // The same with whole rows (store/whole_rows.h), for training alone.
  StatusOr<ServerRows> LookupWhole(const LookupRowsRequest& request);
  // Applies the update, also one that was applied before. kFailedPrecondition: not configured.
  StatusOr<UpdateResult> Update(const UpdateRowsRequest& request);
  // Values must be finite: the decoder has checked those of a message, and other callers check
  // their own.
  Status SetRows(const SetRowsRequest& request);

  const Options& options() const { return options_; }
  // Differs from that of every other life of a server; never 0.
  uint64_t incarnation() const { return incarnation_; }
  // Of a lookup's stamp: another one since rows were set, loaded or cleared, by which a rank with
  // consistency="exact" knows that the rows that it holds are not those of the server.
  uint64_t row_incarnation() const;
  // What the server counts, what its store holds, and its RPC.
  // Counts since the start. Cheap enough for every scrape; it visits each shard for the rows held.
  Metrics metrics() const;
  // The phases of this server's work; as long as it lives.
  std::vector<const DurationStats*> durations() const;
  // For snapshots, loading and following packets, beside the requests. Valid as long as the server.
  store::EmbeddingStore& embedding_store() { return *store_; }

 private:
  // Whether a method may be called at a server for inference.
  enum class Access : uint8_t { kReads, kReadsOrInserts, kChangesRows };
  // Why requests are refused.
  enum class Refusal : uint8_t { kNone, kStandby, kGathering, kHandedOver };

  ParameterServer(const Options& options, std::unique_ptr<store::EmbeddingStore> rows);

  template <typename Request, typename Reply, typename Function>
  void Register(const Method<Request, Reply>& method, Access access, Function handle,
                DurationStats* decoding = nullptr);
  static bool Changes(Access access, const Buffer& body);
  std::unique_ptr<StandbyLink> MakeLink();
  std::unique_ptr<OperationLog> MakeLog();
  void AddStandbyMetrics(Metrics* metrics) const;
  Status CheckAllowed(const MethodId& method, Access access) const;
  // Refuses a config that a second copy of the rows could not follow.
  Status CheckReplicable(const TrainConfig& config) const;
  // Update(), unless the key's result is remembered. A repetition that overtakes its first request
  // waits for it until the deadline.
  StatusOr<UpdateResult> UpdateOnce(const UpdateRowsRequest& request,
                                    const net::CallContext& context);

  const Options options_;
  const Placement placement_;  // as the options say
  // Set once, read by every request of a read-only server.
  std::atomic<bool> loaded_ = false;  // counts for read-only servers
  const uint64_t incarnation_ = DrawIncarnation();
  const std::unique_ptr<store::EmbeddingStore> store_;
  // Keys are forgotten with the server's life, together with the rows: after a restart the
  // incarnation tells workers that nothing is remembered.
  UpdateDeduplicator updates_{UpdateDeduplicator::Limits{}};
  // Of the latest lookup, as the published gauge has it.
  std::atomic<double> last_missing_ratio_{0};
  CounterList counters_;
  // The update counter of lookup stamps. It is raised after the update is applied, see Update().
  Counter num_updates_{counters_, {"num_updates", "persia_updates", "Update requests applied."}};
  Counter num_repeated_{counters_,
                        {"num_repeated_updates", "persia_repeated_updates",
                         "Update requests answered from memory: sent again."}};
  Counter sum_staleness_{counters_,
                         {"sum_staleness", "persia_update_staleness",
                          "Updates between lookups and their own updates, summed."}};
  Counter max_staleness_{
      counters_,
      {"max_staleness", "persia_update_staleness_max",
       "Updates between a lookup and its own update, at most.", MetricKind::kGauge}};
  Counter num_looked_up_rows_{counters_,
                              {"num_looked_up_rows", "persia_lookup_rows", "Rows asked for."}};
  ShardLoads shard_loads_;
  DurationStats decode_times_{"decode"};
  DurationStats encode_times_{"encode"};
  DurationStats lookup_times_{"lookup"};
  DurationStats inference_times_{"inference lookup"};
  DurationStats update_times_{"update"};
  DurationStats set_times_{"set"};
  // By method number: the handlers whose requests a primary sends on.
  std::unordered_map<uint8_t, net::Handler> operations_;
  InheritedUpdates inherited_;  // of the servers that this one has replaced
  std::atomic<Refusal> refusal_;
  std::shared_mutex gate_;  // shared by each request; HandOver() waits for those under way
  RowReceiver received_{store_.get(), &updates_};  // the copy of the primary's rows
  const std::unique_ptr<StandbyLink> standby_;     // null: requests are not sent on
  const std::unique_ptr<OperationLog> log_;        // null: made as a primary
  const std::unique_ptr<RowGathering> gathering_;  // null: made without num_sources
  mutable std::mutex transfer_mutex_;              // serialises the calls of a transfer
  std::unique_ptr<RowTransfer> transfer_;          // null: there is none
  net::Server rpc_;  // last: destroyed first, so that no handler outlives what it uses
};

}  // namespace persia::server

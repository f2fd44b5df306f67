#include "server/parameter_server.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/hash.h"
#include "net/rpc.h"
#include "store/whole_rows.h"

namespace persia::server {
namespace {

using net::CallContext;

static_assert(kMaxRowDim == store::kMaxDim);

// Joins adjacent blocks of one dim: their signs and rows lie in memory as those of one block would,
// and the store overlaps the cache misses of a block.
std::vector<store::RowBlock> ToRowBlocks(const SignBlocks& request) {
  std::vector<store::RowBlock> blocks;
  size_t begin = 0, end = 0;
  for (const SignBlock& block : request.blocks) {
    if (blocks.empty() || blocks.back().dim != block.dim) {
      blocks.push_back({block.dim, {}});
      begin = end;
    }
    end += block.num_signs;
    blocks.back().signs = request.signs.subspan(begin, end - begin);
  }
  return blocks;
}

// The store counts without knowing of metrics; their names are given here, once.
void AddStoreMetrics(const store::StoreStats& store, Metrics* metrics) {
  metrics->AddGauge("num_rows", "persia_rows", "Rows held.", store.num_rows);
  metrics->AddGauge("memory_bytes", "persia_rows_bytes", "Memory of rows and index.",
                    store.memory_bytes);
  metrics->AddCounter("num_missing_rows", "index_miss_count", "Rows that a lookup did not find.",
                      store.lookups.num_missing);
  metrics->AddCounter("num_inserted_rows", "persia_inserted_rows",
                      "Rows made by lookups for training.", store.lookups.num_inserted);
  metrics->AddCounter("num_unadmitted_rows", "persia_unadmitted_rows",
                      "Missing rows that admission refused.", store.lookups.num_unadmitted);
  metrics->AddCounter("num_evicted_rows", "persia_evicted_rows", "Rows evicted to make room.",
                      store.lookups.num_evicted);
  metrics->AddCounter("num_expired_rows", "persia_expired_rows",
                      "Rows that no training batch used for their time to live.",
                      store.lookups.num_expired);
  metrics->AddCounter("num_small_rows", "persia_small_rows",
                      "Rows below their least norm, pruned before a checkpoint.",
                      store.lookups.num_small);
  metrics->AddCounter("num_updated_rows", "persia_updated_rows", "Rows updated.",
                      store.updates.num_updated);
  metrics->AddCounter("num_skipped_gradients", "gradient_id_miss_count",
                      "Gradients whose rows were gone or not admitted.", store.updates.num_missing);
  metrics->AddCounter("num_nonfinite_rows", "persia_nonfinite_rows",
                      "Rows not updated because their gradient was NaN or infinite.",
                      store.updates.num_nonfinite);
}

}  // namespace

StatusOr<std::unique_ptr<ParameterServer>> ParameterServer::Create(const Options& options) {
  if (options.replica_index >= options.replica_size) {
    return InvalidArgument("replica_index is ", options.replica_index, "; with replica_size ",
                           options.replica_size, " it must be below that");
  }
  // Here, where it can be refused.
  PERSIA_RETURN_IF_ERROR(Placement::Create(options.replica_size, 0, options.moved_shards).status());
  PERSIA_ASSIGN_OR_RETURN(auto rows, options.tier
                                         ? store::EmbeddingStore::Open(options.store, *options.tier)
                                         : store::EmbeddingStore::Create(options.store));
  return std::unique_ptr<ParameterServer>(new ParameterServer(options, std::move(rows)));
}

ParameterServer::ParameterServer(const Options& options,
                                 std::unique_ptr<store::EmbeddingStore> rows)
    : options_(options),
      placement_(Placement::Create(options.replica_size, 0, options.moved_shards).value()),
      store_(std::move(rows)),
      refusal_(options.is_standby        ? Refusal::kStandby
               : options.num_sources > 0 ? Refusal::kGathering
                                         : Refusal::kNone),
      standby_(MakeLink()),
      log_(options.is_standby ? MakeLog() : nullptr),
      gathering_(options.num_sources > 0
                     ? std::make_unique<RowGathering>(store_.get(), &inherited_, incarnation_,
                                                      options.num_sources, options.replica_size)
                     : nullptr),
      rpc_(options.rpc) {
  // Each method is described by its Method; what is written here is only what it does.
  Register(kConfigureServer, Access::kChangesRows,
           [this](const ConfigureRequest& request, const CallContext&) {
             if (standby_ != nullptr) PERSIA_RETURN_IF_ERROR(CheckReplicable(request.config));
             return store_->Configure(request.config, request.replace);
           });
  Register(
      kLookupRows, Access::kReadsOrInserts,
      [this](const LookupRowsRequest& request, const CallContext&) -> StatusOr<ServerRows> {
        // A small request can ask for a huge reply: the limit holds before it is allocated.
        const uint64_t num_floats = request.blocks.num_floats();
        if (num_floats <= options_.rpc.max_body_bytes / sizeof(float)) return Lookup(request);
        return InvalidArgument("the rows asked for have ", num_floats,
                               " floats, more than a reply of ", options_.rpc.max_body_bytes,
                               " bytes holds; ask for fewer signs at once");
      },
      &decode_times_);
  Register(kLookupWholeRows, Access::kReadsOrInserts,
           [this](const LookupRowsRequest& request, const CallContext&) {
             return LookupWhole(request);
           });
  Register(kUpdateRows, Access::kChangesRows,
           [this](const UpdateRowsRequest& request, const CallContext& context) {
             return UpdateOnce(request, context);
           });
  Register(kSetRows, Access::kChangesRows,
           [this](const SetRowsRequest& request, const CallContext&) { return SetRows(request); });
  Register(kClearRows, Access::kChangesRows, [this](const Empty&, const CallContext&) {
    store_->Clear();
    return Status::Ok();
  });
  Register(kCountRows, Access::kReads,
           [this](const Empty&, const CallContext&) { return StatusOr<uint64_t>(store_->size()); });
  Register(kPrefetchRows, Access::kReads,
           [this](std::span<const uint64_t> signs, const CallContext&) {
             store_->tier().Prefetch(signs);  // of more signs than fit, the store drops the rest
             return StatusOr(PrefetchRowsReply{store_->tier().WantsPrefetch() ? 1u : 0u});
           });
  rpc_.Handle(kReplicate,
              net::MakeHandler(
                  kReplicate,
                  [this](const ReplicateRequest& request, const CallContext& context) -> Status {
                    if (gathering_ != nullptr) return gathering_->Take(request);
                    if (log_ == nullptr) return FailedPrecondition("this server is no standby");
                    return log_->Take(request, context.deadline);
                  }));
  Register(kMeasureLoad, Access::kReads, [this](const Empty&, const CallContext&) {
    const store::StoreStats stats = store_->stats();
    return StatusOr(ServerLoad{stats.num_rows, stats.memory_bytes, num_looked_up_rows_.value(),
                               stats.updates.num_updated});
  });
}

// Checks access before the request is decoded: a server that may not answer does not look at it.
template <typename Request, typename Reply, typename Function>
void ParameterServer::Register(const Method<Request, Reply>& method, Access access, Function handle,
                               DurationStats* decoding) {
  auto handler = net::MakeHandler(method, std::move(handle), decoding);
  if (access != Access::kReads) operations_[method.number] = handler;
  // `method` and `access` are captured by value: they live as long as the handler.
  rpc_.Handle(method,
              [this, method, access, handler = std::move(handler)](
                  const Buffer& body, const CallContext& context) -> StatusOr<Segments> {
                const std::shared_lock pass(gate_);
                PERSIA_RETURN_IF_ERROR(CheckAllowed(method, access));
                if (standby_ == nullptr) return handler(body, context);
                PERSIA_RETURN_IF_ERROR(standby_->CheckServes());
                if (!Changes(access, body)) {
                  auto reply = handler(body, context);
                  // Again: a pause within may have been longer than the lease.
                  PERSIA_RETURN_IF_ERROR(standby_->CheckServes());
                  return reply;
                }
                return standby_->Run(method, body, [&] { return handler(body, context); });
              });
}

// Whether the request changes the store. A lookup says so itself.
bool ParameterServer::Changes(Access access, const Buffer& body) {
  if (access != Access::kReadsOrInserts) return access == Access::kChangesRows;
  const auto lookup = DecodeMessage<LookupRowsRequest>(body.span());
  return lookup.ok() && lookup.value().train;
}

std::unique_ptr<StandbyLink> ParameterServer::MakeLink() {
  if (options_.standby_deadline.count() == 0) return nullptr;
  const StandbyLink::Options link{
      .incarnation = incarnation_,
      .deadline = options_.standby_deadline,
      // Two handler threads are left for requests that change nothing. Others may wait there, too,
      // but not for the standby's answer: for a place, which is for the lease at most, and for
      // operations that are being applied.
      .max_waiting = std::max(3u, options_.rpc.num_handler_threads) - 2};
  // A checkpoint may have brought the config; while the copy is under way, none is loaded.
  const auto begin_copy = [this]() -> StatusOr<std::unique_ptr<RowCopy>> {
    PERSIA_ASSIGN_OR_RETURN(auto copy, RowCopy::Begin(*store_, updates_));
    if (const auto config = store_->config()) PERSIA_RETURN_IF_ERROR(CheckReplicable(*config));
    return copy;
  };
  return std::make_unique<StandbyLink>(link, begin_copy);
}

std::unique_ptr<OperationLog> ParameterServer::MakeLog() {
  // The primary sends what it has applied. The reply is of no use here.
  const auto apply = [this](uint8_t method, const Buffer& body) {
    const auto operation = operations_.find(method);
    if (operation == operations_.end()) {
      return FailedPrecondition("no operation has the method ", method);
    }
    try {
      return operation->second(body, CallContext{net::Clock::time_point::max()}).status();
    } catch (const std::exception& error) {
      return Internal(error.what());
    }
  };
  return std::make_unique<OperationLog>(
      OperationLog::Options{.standby = incarnation_, .lease = LeaseOf(options_.standby_deadline)},
      apply, [this](ReplicateKind kind, std::span<const std::byte> body) {
        return received_.Take(kind, body);
      });
}

Status ParameterServer::TakeOver(bool primary_has_ended) {
  if (log_ == nullptr) return FailedPrecondition("this server is no standby");
  PERSIA_RETURN_IF_ERROR(log_->TakeOver(primary_has_ended));
  refusal_ = Refusal::kNone;
  return Status::Ok();
}

Status ParameterServer::CheckTransferable() const {
  if (standby_ != nullptr) return FailedPrecondition("it has a standby, or may have one");
  if (options_.tier.has_value()) return FailedPrecondition("its rows are in a storage tier");
  if (options_.read_only) return FailedPrecondition("it is of an inference job");
  const auto config = store_->config();
  return config.has_value() ? CheckReplicable(*config) : Status::Ok();
}

Status ParameterServer::BeginTransfer(const RowTransfer::Options& transfer) {
  const std::lock_guard lock(transfer_mutex_);
  if (transfer_ != nullptr) return FailedPrecondition("it sends its rows to others already");
  if (refusal_ != Refusal::kNone) return FailedPrecondition("it does not answer requests");
  PERSIA_RETURN_IF_ERROR(CheckTransferable());
  if (store_->change_status().max_rows > 0) {
    return FailedPrecondition("its changes are tracked for incremental updates");
  }
  RowTransfer::Options options = transfer;
  options.incarnation = incarnation_;
  options.index = options_.replica_index;
  PERSIA_ASSIGN_OR_RETURN(transfer_, RowTransfer::Begin(*store_, options));
  return Status::Ok();
}

// Requests that came before have ended once the gate was closed for a moment; later ones see the
// refusal.
Status ParameterServer::HandOver() {
  const std::lock_guard lock(transfer_mutex_);
  if (transfer_ == nullptr) return FailedPrecondition("it sends its rows to no other server");
  // The config of a second time would begin the rows of the new servers anew.
  if (refusal_ == Refusal::kHandedOver) {
    return FailedPrecondition("it has handed its rows over already");
  }
  PERSIA_RETURN_IF_ERROR(transfer_->StopFollowing());
  refusal_ = Refusal::kHandedOver;
  {
    const std::unique_lock closed(gate_);
  }
  PERSIA_RETURN_IF_ERROR(CheckTransferable());
  return transfer_->SendLast(
      inherited_.ForNext(updates_.Applied(), placement().ShardsOf(options_.replica_index)));
}

void ParameterServer::Resume() {
  const std::lock_guard lock(transfer_mutex_);
  transfer_.reset();
  if (refusal_ == Refusal::kHandedOver) refusal_ = Refusal::kNone;
}

std::optional<RowTransfer::Progress> ParameterServer::transfer_progress() const {
  const std::lock_guard lock(transfer_mutex_);
  if (transfer_ == nullptr) return std::nullopt;
  return transfer_->progress();
}

Status ParameterServer::Serve() {
  if (gathering_ == nullptr) return FailedPrecondition("it was made with rows of its own");
  if (!gathering_->is_complete()) return FailedPrecondition("it still gathers its rows");
  refusal_ = Refusal::kNone;
  return Status::Ok();
}

// Repeating a lookup that the primary did not answer counts its rows twice, and clocks and
// checkpoints are the primary's own: what depends on them would differ between the two.
Status ParameterServer::CheckReplicable(const TrainConfig& config) const {
  const auto check = [](const RowConfig& rows) {
    const char* field = rows.admit_after > 1           ? "admit_after"
                        : rows.time_to_live_sec > 0.0f ? "time_to_live_sec"
                        : rows.min_norm > 0.0f         ? "min_norm"
                                                       : nullptr;
    if (field == nullptr) return Status::Ok();
    return FailedPrecondition(field,
                              " is set: parameter servers with standbys, and a change of their "
                              "number, do not support it");
  };
  PERSIA_RETURN_IF_ERROR(check(config));
  for (const GroupConfig& group : config.groups) PERSIA_RETURN_IF_ERROR(check(group.rows));
  return Status::Ok();
}

// An inference server must not change: followers apply what training changed, and nothing else.
Status ParameterServer::CheckAllowed(const MethodId& method, Access access) const {
  switch (refusal_.load()) {
    case Refusal::kNone: break;
    case Refusal::kStandby: return Unavailable("this parameter server is a standby");
    case Refusal::kGathering: return Unavailable("this parameter server still gathers its rows");
    case Refusal::kHandedOver:
      return Unavailable("this parameter server has handed its rows over to other servers");
  }
  if (!options_.read_only) return Status::Ok();
  if (access == Access::kChangesRows) {
    return FailedPrecondition("this parameter server is of an inference job (job_type: Infer): ",
                              method.name, " would change its rows");
  }
  if (!loaded_) return Unavailable("this parameter server still loads its checkpoint");
  return Status::Ok();
}

StatusOr<ServerRows> ParameterServer::Lookup(const LookupRowsRequest& request) {
  ServerRows answer;
  // Read before the rows are: an update in between then counts as staleness instead of being
  // missed.
  answer.stamp = {row_incarnation(), num_updates_.value()};
  const uint64_t num_floats = request.blocks.num_floats();
  {
    const Timed timed(encode_times_);
    answer.storage = Buffer(num_floats * sizeof(float));
  }
  auto* rows = reinterpret_cast<float*>(answer.storage.data());
  // The view stays valid when the answer moves: it points to the buffer's memory.
  answer.rows = {rows, num_floats};
  const auto mode = request.train ? store::LookupMode::kTrain : store::LookupMode::kInference;
  store::LookupReport report;
  {
    const Timed timed(request.train ? lookup_times_ : inference_times_);
    PERSIA_RETURN_IF_ERROR(store_->Lookup(ToRowBlocks(request.blocks), mode, rows, &report));
  }
  const uint64_t num_rows = request.blocks.signs.size();
  if (num_rows == 0) return answer;
  // After the lookup, so that one that is refused counts nothing.
  num_looked_up_rows_.Add(num_rows);
  shard_loads_.Count(request.blocks.signs);
  last_missing_ratio_.store(static_cast<double>(report.num_missing) / static_cast<double>(num_rows),
                            std::memory_order_relaxed);
  return answer;
}

StatusOr<ServerRows> ParameterServer::LookupWhole(const LookupRowsRequest& request) {
  constexpr uint64_t kMostState = 4;  // floats of a whole row for each of its embedding
  if (request.blocks.num_floats() > options_.rpc.max_body_bytes / sizeof(float) / kMostState) {
    return InvalidArgument("the rows asked for have ", request.blocks.num_floats(),
                           " floats without their optimizer state: ask for fewer signs at once");
  }
  ServerRows answer;
  answer.stamp = {row_incarnation(), num_updates_.value()};
  store::LookupReport report;
  const Timed timed(lookup_times_);
  PERSIA_ASSIGN_OR_RETURN(
      answer.storage, store::LookupWholeRows(ToRowBlocks(request.blocks), store_.get(), &report));
  answer.rows = {reinterpret_cast<const float*>(answer.storage.data()),
                 answer.storage.size() / sizeof(float)};
  num_looked_up_rows_.Add(request.blocks.signs.size());
  shard_loads_.Count(request.blocks.signs);
  return answer;
}

uint64_t ParameterServer::row_incarnation() const {
  const uint64_t num_replacements = store_->shards().num_replacements();
  if (num_replacements == 0) return incarnation_;
  return std::max<uint64_t>(1, SignHash(incarnation_ + num_replacements));
}

// A counter ahead of ours is a mistake of the caller; staleness would wrap around.
StatusOr<UpdateResult> ParameterServer::UpdateOnce(const UpdateRowsRequest& request,
                                                   const CallContext& context) {
  // A stamp of another life is no mistake: the server has restarted since, or rows were set or
  // loaded, and staleness counts as 0.
  if (request.lookup.incarnation == row_incarnation() &&
      request.lookup.update_counter > num_updates_.value()) {
    return InvalidArgument("lookup_counter is ", request.lookup.update_counter,
                           ", ahead of the server's; send the one that the lookup returned");
  }
  bool repeated = false;
  const auto apply = [&] {
    if (gathering_ == nullptr || !inherited_.Has(request.key)) return Update(request);
    // Servers of before have applied a part of it, or all.
    const RemainingUpdate rest = inherited_.Remaining(request);
    return Update({request.key, request.lookup, {rest.blocks, rest.signs}, rest.gradients});
  };
  auto result = updates_.Once(request.key, context.deadline, apply, &repeated);
  // A repetition that had to apply the update itself, because the first try failed, is none.
  if (result.ok() && repeated) num_repeated_.Add();
  return result;
}

StatusOr<UpdateResult> ParameterServer::Update(const UpdateRowsRequest& request) {
  if (!store_->config().has_value()) {
    return FailedPrecondition("the server is not configured; send ConfigureServer first");
  }
  store::UpdateReport report;
  {
    const Timed timed(update_times_, request.key.reference);
    PERSIA_RETURN_IF_ERROR(
        // Several updates run side by side; the store's shards order those that meet in a row.
        store_->Update(ToRowBlocks(request.blocks), request.gradients.data(), &report));
  }
  // Counted after it is applied, so that a lookup never claims to have seen an update that it has
  // not. The number taken is unique: updates that run side by side count one another.
  const uint64_t counter = num_updates_.Add();
  const bool same_life = request.lookup.incarnation == row_incarnation();
  const uint64_t staleness = same_life ? counter - request.lookup.update_counter : 0;
  sum_staleness_.Add(staleness);
  max_staleness_.RaiseTo(staleness);
  return UpdateResult{staleness, report.num_updated, report.num_missing};
}

Status ParameterServer::SetRows(const SetRowsRequest& request) {
  const Timed timed(set_times_);
  return store_->SetRows(ToRowBlocks(request.blocks), request.rows.data());
}

Metrics ParameterServer::metrics() const {
  Metrics metrics;
  counters_.AddTo(&metrics);
  AddStoreMetrics(store_->stats(), &metrics);
  metrics.AddRatio("last_missing_ratio", "index_miss_ratio",
                   "Missing rows of the latest lookup by its rows.", last_missing_ratio_.load());
  metrics.AddFlag("configured", store_->config().has_value());
  AddStandbyMetrics(&metrics);
  rpc_.AddMetrics(&metrics);
  return metrics;
}

void ParameterServer::AddStandbyMetrics(Metrics* metrics) const {
  if (standby_ != nullptr) {
    const bool replicates = standby_->state() == StandbyLink::State::kReplicating;
    metrics->AddGauge("replicates", "persia_replicates",
                      "1 while a standby has every change of this server, 0 without one.",
                      replicates && !standby_->is_copying() ? 1 : 0);
  }
  if (log_ != nullptr) {
    metrics->AddGauge("num_waiting_operations", "persia_standby_waiting_operations",
                      "Operations of the primary that this standby has and has not applied.",
                      log_->num_waiting());
    metrics->AddGauge("is_unfit_standby", "persia_standby_unfit",
                      "1: an operation of the primary failed at this standby, which ends.",
                      log_->state() == OperationLog::State::kUnfit ? 1 : 0);
  }
}

std::vector<const DurationStats*> ParameterServer::durations() const {
  std::vector<const DurationStats*> all = rpc_.durations();
  for (const DurationStats* phase : {&decode_times_, &encode_times_, &lookup_times_,
                                     &inference_times_, &update_times_, &set_times_}) {
    all.push_back(phase);
  }
  return all;
}

}  // namespace persia::server

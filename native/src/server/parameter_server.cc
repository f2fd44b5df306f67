#include "server/parameter_server.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/incarnation.h"
#include "base/row_protocol.h"
#include "server/update_memory.h"

namespace persia::server {
namespace {

using net::CallContext;
using net::Method;
using net::Parts;

static_assert(kMaxRowDim == store::EmbeddingStore::kMaxDim);

// Blocks of one dim that follow one another become one: their signs and rows lie as those of one
// would, and the store overlaps the cache misses of a block.
std::vector<store::RowBlock> ToRowBlocks(const RowBlocksView& view) {
  std::vector<store::RowBlock> blocks;
  size_t begin = 0, end = 0;
  for (const RowBlockHeader& block : view.blocks) {
    if (blocks.empty() || blocks.back().dim != block.dim) {
      blocks.push_back({block.dim, {}});
      begin = end;
    }
    end += block.num_signs;
    blocks.back().signs = view.signs.subspan(begin, end - begin);
  }
  return blocks;
}

template <typename T>
Parts FixedReply(const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  Parts parts;
  parts.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
  return parts;
}

// A reply buffer with room for `num_floats` behind the
// head, its last bytes zero where they are padding.
Buffer RowsReplyBuffer(uint64_t num_floats) {
  const uint64_t row_bytes = num_floats * sizeof(float);
  const auto padding = ArrayPadding(row_bytes);
  Buffer buffer(sizeof(LookupRowsReply) + row_bytes + padding.size());
  std::memcpy(buffer.data() + buffer.size() - padding.size(), padding.data(), padding.size());
  return buffer;
}

// What `work` returns, its time recorded.
template <typename Work>
auto Measured(DurationStats& stats, Work work) {
  const Timed timed(stats);
  return work();
}

Status RequireEmpty(std::span<const std::byte> body, Method method) {
  if (body.empty()) return Status::Ok();
  return Corruption("a " + std::string(net::MethodName(method)) + " request of " +
                    std::to_string(body.size()) + " bytes; it has no body");
}

std::string ToJson(const ServerStats& stats, uint64_t incarnation) {
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016" PRIx64, incarnation);
  const double mean = stats.num_updates == 0 ? 0.0
                                             : static_cast<double>(stats.sum_staleness) /
                                                   static_cast<double>(stats.num_updates);
  std::string json = "{\"incarnation\": \"" + std::string(hex) + "\"";
  const auto add = [&json](const char* name, uint64_t value) {
    json += ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  add("num_rows", stats.store.num_rows);
  add("memory_bytes", stats.store.memory_bytes);
  add("num_updates", stats.num_updates);
  add("num_repeated_updates", stats.num_repeated_updates);
  add("max_staleness", stats.max_staleness);
  json += ", \"mean_staleness\": " + std::to_string(mean);
  add("num_lookup_missing", stats.store.lookups.num_missing);
  add("num_inserted", stats.store.lookups.num_inserted);
  add("num_unadmitted", stats.store.lookups.num_unadmitted);
  add("num_evicted", stats.store.lookups.num_evicted);
  add("num_rows_updated", stats.store.updates.num_updated);
  add("num_update_missing", stats.store.updates.num_missing);
  return json + "}";
}

}  // namespace

// One handler for each method; they run concurrently on the RPC server's threads.
class ParameterServer::Impl {
 public:
  Impl(const Options& options, std::unique_ptr<store::EmbeddingStore> rows)
      : options_(options), store_(std::move(rows)), rpc_(options.rpc) {
    Register(Method::kPing, &Impl::Ping);
    Register(Method::kConfigureServer, &Impl::Configure);
    Register(Method::kLookupRows, &Impl::LookupRows);
    Register(Method::kUpdateRows, &Impl::UpdateRows);
    Register(Method::kSetRows, &Impl::SetRows);
    Register(Method::kServerStats, &Impl::Stats);
    Register(Method::kClearRows, &Impl::ClearRows);
    Register(Method::kCountRows, &Impl::CountRows);
    Register(Method::kPrefetchRows, &Impl::PrefetchRows);
  }

  net::Server& rpc() { return rpc_; }
  void MarkLoaded() { loaded_ = true; }
  uint64_t incarnation() const { return incarnation_; }
  store::EmbeddingStore& rows() { return *store_; }
  ServerStats stats() const;
  std::vector<const DurationStats*> durations() const;

 private:
  using Body = std::span<const std::byte>;
  using Reply = StatusOr<Parts>;

  void Register(Method method, Reply (Impl::*handle)(Body, const CallContext&)) {
    rpc_.Handle(method, [this, method, handle](const Buffer& request, const CallContext& context) {
      if (options_.read_only) {
        if (Status allowed = AllowedForInference(method); !allowed.ok()) return Reply(allowed);
      }
      return (this->*handle)(request.span(), context);
    });
  }

  Status AllowedForInference(Method method) const {
    const bool changes_rows = method == Method::kConfigureServer || method == Method::kUpdateRows ||
                              method == Method::kSetRows || method == Method::kClearRows;
    if (changes_rows) {
      return FailedPrecondition("this parameter server is of an inference job (job_type: Infer): " +
                                std::string(net::MethodName(method)) + " would change its rows");
    }
    if (!loaded_) return Unavailable("this parameter server still loads its checkpoint");
    return Status::Ok();
  }

  Reply Ping(Body body, const CallContext& context);
  Reply Configure(Body body, const CallContext& context);
  Reply LookupRows(Body body, const CallContext& context);
  Reply UpdateRows(Body body, const CallContext& context);
  Reply SetRows(Body body, const CallContext& context);
  Reply Stats(Body body, const CallContext& context);
  Reply ClearRows(Body body, const CallContext& context);
  Reply CountRows(Body body, const CallContext& context);
  Reply PrefetchRows(Body body, const CallContext& context);
  StatusOr<UpdateRowsReply> Apply(const UpdateRowsRequest& request);
  void CountLookup(uint64_t num_rows, uint64_t num_missing);

  const Options options_;
  std::atomic<bool> loaded_ = false;  // counts for read-only servers
  const uint64_t incarnation_ = DrawIncarnation();
  const std::unique_ptr<store::EmbeddingStore> store_;
  UpdateMemory updates_{UpdateMemory::Limits{}};
  std::atomic<uint64_t> update_counter_{0};
  std::atomic<uint64_t> num_repeated_{0};
  std::atomic<uint64_t> max_staleness_{0};
  std::atomic<uint64_t> sum_staleness_{0};
  std::atomic<uint64_t> num_looked_up_rows_{0};
  std::atomic<double> last_missing_ratio_{0};
  DurationStats decode_times_{"decode"};
  DurationStats encode_times_{"encode"};
  DurationStats lookup_times_{"lookup"};
  DurationStats inference_times_{"inference lookup"};
  DurationStats update_times_{"update"};
  DurationStats set_times_{"set"};
  net::Server rpc_;  // last: destroyed first, so that no handler outlives what it uses
};

ParameterServer::Impl::Reply ParameterServer::Impl::Ping(Body body, const CallContext&) {
  PERSIA_RETURN_IF_ERROR(RequireEmpty(body, Method::kPing));
  return FixedReply(PingReply{incarnation_, options_.replica_index, options_.replica_size});
}

ParameterServer::Impl::Reply ParameterServer::Impl::Configure(Body body, const CallContext&) {
  auto request = DecodeConfigureRequest(body);
  if (!request.ok()) return request.status();
  PERSIA_RETURN_IF_ERROR(store_->Configure(request->config, request->replace));
  return Parts();
}

ParameterServer::Impl::Reply ParameterServer::Impl::LookupRows(Body body, const CallContext&) {
  auto request = Measured(decode_times_, [&] { return DecodeLookupRequest(body); });
  if (!request.ok()) return request.status();
  const uint64_t num_floats = request->blocks.num_floats;
  // A small request can ask for a huge reply: the limit holds before it is allocated.
  if (num_floats > options_.rpc.max_body_bytes / sizeof(float)) {
    return InvalidArgument(
        "the rows asked for have " + std::to_string(num_floats) + " floats, more than a reply of " +
        std::to_string(options_.rpc.max_body_bytes) + " bytes holds; ask for fewer signs at once");
  }
  // Read before the rows are: an update that lands in between
  // then counts as staleness rather than being missed.
  const LookupRowsReply head{incarnation_, update_counter_.load()};
  Buffer reply = Measured(encode_times_, [&] { return RowsReplyBuffer(num_floats); });
  std::memcpy(reply.data(), &head, sizeof(head));
  auto* rows = reinterpret_cast<float*>(reply.data() + sizeof(head));
  const auto mode = request->train ? store::LookupMode::kTrain : store::LookupMode::kInference;
  store::LookupReport report;
  PERSIA_RETURN_IF_ERROR(Measured(request->train ? lookup_times_ : inference_times_, [&] {
    return store_->Lookup(ToRowBlocks(request->blocks), mode, rows, &report);
  }));
  CountLookup(request->blocks.signs.size(), report.num_missing);
  Parts parts;
  parts.AddOwned(std::move(reply));
  return parts;
}

void ParameterServer::Impl::CountLookup(uint64_t num_rows, uint64_t num_missing) {
  if (num_rows == 0) return;
  num_looked_up_rows_.fetch_add(num_rows, std::memory_order_relaxed);
  last_missing_ratio_.store(static_cast<double>(num_missing) / static_cast<double>(num_rows),
                            std::memory_order_relaxed);
}

ParameterServer::Impl::Reply ParameterServer::Impl::UpdateRows(Body body,
                                                               const CallContext& context) {
  auto request = DecodeUpdateRequest(body);
  if (!request.ok()) return request.status();
  const UpdateRowsKey& key = request->key;
  if (key.lookup_incarnation == incarnation_ && key.lookup_counter > update_counter_.load()) {
    return InvalidArgument("lookup_counter is " + std::to_string(key.lookup_counter) +
                           ", ahead of the server's; send the one that the lookup returned");
  }
  if (!store_->config().has_value()) {
    return FailedPrecondition("the server is not configured; send ConfigureServer first");
  }
  bool repeated = false;
  auto reply = updates_.Once(
      {key.worker_incarnation, key.reference}, context.deadline, [&] { return Apply(*request); },
      &repeated);
  if (!reply.ok()) return reply.status();
  if (repeated) ++num_repeated_;
  return FixedReply(*reply);
}

StatusOr<UpdateRowsReply> ParameterServer::Impl::Apply(const UpdateRowsRequest& request) {
  store::UpdateReport report;
  {
    const Timed timed(update_times_, request.key.reference);
    PERSIA_RETURN_IF_ERROR(
        store_->Update(ToRowBlocks(request.blocks), request.gradients.data(), &report));
  }
  // Counted after it is applied, so that a lookup never claims to have seen an update it has not;
  // the number taken is unique, and so updates that run side by side count one another.
  const uint64_t counter = update_counter_.fetch_add(1);
  const bool same_life = request.key.lookup_incarnation == incarnation_;
  const uint64_t staleness = same_life ? counter - request.key.lookup_counter : 0;
  sum_staleness_ += staleness;
  uint64_t seen = max_staleness_.load();
  while (seen < staleness && !max_staleness_.compare_exchange_weak(seen, staleness)) {
  }
  return UpdateRowsReply{staleness, report.num_updated, report.num_missing};
}

ParameterServer::Impl::Reply ParameterServer::Impl::SetRows(Body body, const CallContext&) {
  auto request = DecodeSetRowsRequest(body);
  if (!request.ok()) return request.status();
  PERSIA_RETURN_IF_ERROR(Measured(set_times_, [&] {
    return store_->SetRows(ToRowBlocks(request->blocks), request->rows.data());
  }));
  return Parts();
}

ParameterServer::Impl::Reply ParameterServer::Impl::Stats(Body body, const CallContext&) {
  PERSIA_RETURN_IF_ERROR(RequireEmpty(body, Method::kServerStats));
  const std::string json = ToJson(stats(), incarnation_);
  const auto* bytes = reinterpret_cast<const std::byte*>(json.data());
  Parts parts;
  parts.AddOwned(std::vector<std::byte>(bytes, bytes + json.size()));
  return parts;
}

ParameterServer::Impl::Reply ParameterServer::Impl::ClearRows(Body body, const CallContext&) {
  PERSIA_RETURN_IF_ERROR(RequireEmpty(body, Method::kClearRows));
  store_->Clear();
  return Parts();
}

ParameterServer::Impl::Reply ParameterServer::Impl::CountRows(Body body, const CallContext&) {
  PERSIA_RETURN_IF_ERROR(RequireEmpty(body, Method::kCountRows));
  return FixedReply(store_->size());
}

// Of more signs than have room the store drops the rest.
ParameterServer::Impl::Reply ParameterServer::Impl::PrefetchRows(Body body, const CallContext&) {
  auto request = DecodePrefetchRequest(body);
  if (!request.ok()) return request.status();
  store_->Prefetch(request->signs);
  return FixedReply(PrefetchRowsReply{store_->WantsPrefetch() ? 1u : 0u});
}

ServerStats ParameterServer::Impl::stats() const {
  ServerStats stats;
  stats.num_updates = update_counter_.load();
  stats.num_repeated_updates = num_repeated_.load();
  stats.max_staleness = max_staleness_.load();
  stats.sum_staleness = sum_staleness_.load();
  stats.store = store_->stats();
  stats.num_looked_up_rows = num_looked_up_rows_.load();
  stats.last_missing_ratio = last_missing_ratio_.load();
  stats.configured = store_->config().has_value();
  stats.rpc = rpc_.stats();
  return stats;
}

std::vector<const DurationStats*> ParameterServer::Impl::durations() const {
  std::vector<const DurationStats*> all = rpc_.durations();
  for (const DurationStats* phase : {&decode_times_, &encode_times_, &lookup_times_,
                                     &inference_times_, &update_times_, &set_times_}) {
    all.push_back(phase);
  }
  return all;
}

StatusOr<std::unique_ptr<ParameterServer>> ParameterServer::Create(const Options& options) {
  if (options.replica_index >= options.replica_size) {
    return InvalidArgument("replica_index is " + std::to_string(options.replica_index) +
                           "; with replica_size " + std::to_string(options.replica_size) +
                           " it must be below that");
  }
  auto rows = options.tier ? store::EmbeddingStore::Open(options.store, *options.tier)
                           : store::EmbeddingStore::Create(options.store);
  if (!rows.ok()) return rows.status();
  auto impl = std::make_unique<Impl>(options, std::move(rows).value());
  return std::unique_ptr<ParameterServer>(new ParameterServer(std::move(impl)));
}

ParameterServer::ParameterServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ParameterServer::~ParameterServer() = default;
StatusOr<uint16_t> ParameterServer::Start() { return impl_->rpc().Start(); }
void ParameterServer::Stop(std::chrono::milliseconds timeout) { impl_->rpc().Stop(timeout); }
void ParameterServer::MarkLoaded() { impl_->MarkLoaded(); }
uint64_t ParameterServer::incarnation() const { return impl_->incarnation(); }
ServerStats ParameterServer::stats() const { return impl_->stats(); }
std::vector<const DurationStats*> ParameterServer::durations() const { return impl_->durations(); }
store::EmbeddingStore& ParameterServer::embedding_store() { return impl_->rows(); }

}  // namespace persia::server

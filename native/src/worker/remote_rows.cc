// RemoteRows, declared in worker/row_service.h: the rows of parameter servers, over RPC.
#include <utility>

#include "net/rpc.h"
#include "worker/prefetch_hints.h"
#include "worker/row_service.h"

namespace persia::worker {

RemoteRows::RemoteRows(const Placement& placement) : servers_(Make(placement)) {}

RemoteRows::~RemoteRows() = default;

std::shared_ptr<const RemoteRows::Servers> RemoteRows::Make(const Placement& placement) {
  auto servers = std::make_shared<Servers>();
  servers->placement = placement;
  for (uint32_t i = 0; i < placement.num_servers(); ++i) {
    servers->servers.push_back(
        {std::make_shared<PrefetchHints>(), std::make_unique<net::Channel>(net::Channel::Options{
                                                .peer = "parameter-server " + std::to_string(i)})});
  }
  return servers;
}

std::shared_ptr<const RemoteRows::Servers> RemoteRows::Present() const {
  const std::lock_guard lock(mutex_);
  return servers_;
}

Status RemoteRows::SetServer(uint32_t index, const std::string& address) {
  const auto present = Present();
  const std::vector<Server>& servers = present->servers;
  if (index >= servers.size()) {
    return InvalidArgument("parameter server ", index, ": there are only ", servers.size(),
                           ", counted from 0");
  }
  // Calls that wait for the server are sent to the new address.
  servers[index].channel->SetAddress(address);
  servers[index].hints->Forget();
  return Status::Ok();
}

void RemoteRows::ReplaceServers(const Placement& placement,
                                std::span<const std::string> addresses) {
  auto servers = Make(placement);
  for (size_t i = 0; i < addresses.size(); ++i) {
    servers->servers[i].channel->SetAddress(addresses[i]);
  }
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    servers_.swap(servers);
  }
  // Outside the lock, and after others see the new ones: who fails now looks for them.
  for (const Server& server : servers->servers) server.channel->Close();
}

void RemoteRows::Close() {
  std::shared_ptr<const Servers> servers;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    servers = servers_;
  }
  for (const Server& server : servers->servers) server.channel->Close();
}

std::vector<net::ChannelStats> RemoteRows::channel_stats() const {
  std::vector<net::ChannelStats> stats;
  for (const auto present = Present(); const Server& server : present->servers) {
    stats.push_back(server.channel->stats());
  }
  return stats;
}

// The replies by server. Those without signs are called only if `also_empty`, else theirs is empty.
template <typename Request, typename Reply>
StatusOr<std::vector<Reply>> RemoteRows::CallSome(const Method<Request, Reply>& method,
                                                  const Placement& routed,
                                                  std::span<const Request> requests,
                                                  Deadline deadline, bool also_empty) {
  const auto present = Present();
  if (routed != present->placement) {
    return Unavailable("the requests are for parameter servers that others have replaced");
  }
  std::vector<uint32_t> servers;
  std::vector<net::Channel*> channels;
  std::vector<Request> sent;
  for (uint32_t i = 0; i < requests.size(); ++i) {
    // A server without signs has nothing to answer: in a small batch most have none.
    if (!also_empty && requests[i].blocks.signs.empty()) continue;
    servers.push_back(i);
    channels.push_back(present->servers[i].channel.get());
    sent.push_back(requests[i]);
  }
  PERSIA_ASSIGN_OR_RETURN(
      std::vector<Reply> replies,
      net::CallAll(method, std::span<net::Channel* const>(channels), std::move(sent), deadline));
  std::vector<Reply> by_server(requests.size());
  for (size_t i = 0; i < servers.size(); ++i) {
    by_server[servers[i]] = std::move(replies[i]);
  }
  return by_server;
}

template <typename Request, typename Reply>
StatusOr<std::vector<Reply>> RemoteRows::CallEvery(const Method<Request, Reply>& method,
                                                   const Request& request, Deadline deadline) {
  const auto present = Present();
  std::vector<net::Channel*> channels;
  for (const Server& server : present->servers) channels.push_back(server.channel.get());
  return net::CallAll(method, std::span<net::Channel* const>(channels),
                      std::vector<Request>(channels.size(), request), deadline);
}

// To all servers. Where one fails the others keep the config, which a repetition does not change.
Status RemoteRows::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  return CallEvery(kConfigureServer, {config, replace}, deadline).status();
}

StatusOr<std::vector<ServerRows>> RemoteRows::Lookup(const Placement& routed,
                                                     std::span<const ServerBlocks> requests,
                                                     bool train, Deadline deadline) {
  std::vector<LookupRowsRequest> lookups;
  for (const ServerBlocks& request : requests) lookups.push_back({train, request.view()});
  // ParameterServer (server/parameter_server.cc) answers this and kUpdateRows.
  auto answers =
      CallSome(kLookupRows, routed, std::span<const LookupRowsRequest>(lookups), deadline);
  if (!answers.ok()) return answers;
  for (size_t i = 0; i < requests.size(); ++i) {
    // Pooling indexes the rows by the plan: a short answer must not get there.
    const size_t num_floats = answers.value()[i].rows.size();
    if (num_floats == requests[i].num_floats()) continue;
    return Corruption("parameter-server ", i, ": a LookupRows reply has ", num_floats,
                      " floats instead of ", requests[i].num_floats());
  }
  return answers;
}

// Also of servers without signs: the rank compares the incarnations of their rows.
StatusOr<std::vector<ServerRows>> RemoteRows::LookupWhole(const Placement& routed,
                                                          std::span<const ServerBlocks> requests,
                                                          Deadline deadline) {
  std::vector<LookupRowsRequest> lookups;
  for (const ServerBlocks& request : requests) lookups.push_back({true, request.view()});
  return CallSome(kLookupWholeRows, routed, std::span<const LookupRowsRequest>(lookups), deadline,
                  /*also_empty=*/true);
}

// Does not wait: a hint that comes late is worth nothing, and a lookup must not pay for it.
HintReport RemoteRows::Prefetch(const Placement& routed, std::span<const ServerBlocks> requests) {
  HintReport total;
  const auto present = Present();
  if (routed != present->placement) return total;
  for (uint32_t i = 0; i < requests.size(); ++i) {
    const auto& [hints, channel] = present->servers[i];
    const HintReport sent = PrefetchHints::Send(hints, requests[i].signs, channel.get());
    total.num_signs += sent.num_signs;
    total.num_dropped += sent.num_dropped;
  }
  return total;
}

bool RemoteRows::WantsPrefetch() {
  bool is_wanted = false;
  for (const auto present = Present(); const auto& [hints, channel] : present->servers) {
    is_wanted |= PrefetchHints::IsWanted(hints, channel.get());
  }
  return is_wanted;
}

// Servers that have applied their part before a failure recognise its key when it is repeated.
StatusOr<std::vector<UpdateResult>> RemoteRows::Update(const Placement& routed,
                                                       std::span<const UpdateRowsRequest> requests,
                                                       Deadline deadline) {
  return CallSome(kUpdateRows, routed, requests, deadline);
}

Status RemoteRows::SetRows(const Placement& routed, std::span<const SetRowsRequest> requests,
                           Deadline deadline) {
  return CallSome(kSetRows, routed, requests, deadline).status();
}

Status RemoteRows::Clear(Deadline deadline) { return CallEvery(kClearRows, {}, deadline).status(); }

StatusOr<std::vector<uint64_t>> RemoteRows::Sizes(Deadline deadline) {
  return CallEvery(kCountRows, {}, deadline);
}

StatusOr<std::vector<ServerLoad>> RemoteRows::Loads(Deadline deadline) {
  return CallEvery(kMeasureLoad, {}, deadline);
}

}  // namespace persia::worker

#include "worker/remote_rows.h"

#include <utility>

#include "base/row_protocol.h"
#include "net/channel.h"
#include "worker/fan_out.h"
#include "worker/prefetch_hints.h"
#include "worker/worker_protocol.h"

namespace persia::worker {
namespace {

using net::Method;
using net::Parts;

std::string PeerName(uint32_t index) { return "parameter-server " + std::to_string(index); }

// What a server answered does not decode; the message says which server.
Status BadReply(uint32_t server, const Status& status) {
  return {status.code(), PeerName(server) + ": " + status.message()};
}

std::vector<RowBlockHeader> ToHeaders(std::span<const ServerBlocks::Block> blocks) {
  std::vector<RowBlockHeader> headers;
  headers.reserve(blocks.size());
  for (const ServerBlocks::Block& block : blocks) headers.push_back({block.dim, block.num_signs});
  return headers;
}

void AddArray(std::span<const float> values, Parts* parts) {
  parts->AddView(std::as_bytes(values));
  parts->AddView(ArrayPadding(values.size_bytes()));
}

Parts LookupRequest(const ServerBlocks& blocks, bool train) {
  Parts parts;
  parts.AddOwned(EncodeLookupHead(train, ToHeaders(blocks.blocks)));
  parts.AddView(std::as_bytes(std::span(blocks.signs)));
  return parts;
}

Parts UpdateRequest(const UpdateKey& key, const ServerUpdate& update) {
  Parts parts;
  parts.AddOwned(EncodeUpdateHead(
      {key.worker_incarnation, key.reference, update.lookup_incarnation, update.lookup_counter},
      ToHeaders(update.blocks->blocks)));
  parts.AddView(std::as_bytes(std::span(update.blocks->signs)));
  AddArray(update.gradients, &parts);
  return parts;
}

Parts SetRowsRequest(const ServerBlocks& blocks, std::span<const float> rows) {
  Parts parts;
  parts.AddOwned(EncodeSetRowsHead(ToHeaders(blocks.blocks)));
  parts.AddView(std::as_bytes(std::span(blocks.signs)));
  AddArray(rows, &parts);
  return parts;
}

StatusOr<ServerRows> DecodeRows(Buffer reply, uint64_t num_floats) {
  ServerRows rows;
  auto head = DecodeLookupReply(std::as_const(reply).span(), num_floats, &rows.rows);
  if (!head.ok()) return head.status();
  rows.incarnation = head->incarnation;
  rows.update_counter = head->update_counter;
  rows.storage = std::move(reply);  // its bytes stay where they are
  return rows;
}

}  // namespace

class RemoteRows::Impl {
 public:
  explicit Impl(uint32_t num_servers) {
    for (uint32_t i = 0; i < num_servers; ++i) {
      channels_.push_back(
          std::make_unique<net::Channel>(net::Channel::Options{.peer = PeerName(i)}));
      hints_.push_back(std::make_shared<PrefetchHints>());
    }
  }

  uint32_t num_servers() const { return static_cast<uint32_t>(channels_.size()); }
  net::Channel& channel(uint32_t server) { return *channels_[server]; }
  const std::shared_ptr<PrefetchHints>& hints(uint32_t server) { return hints_[server]; }

  // The reply of each server that is called, in the order of `servers`; fails if any did.
  StatusOr<std::vector<Buffer>> Call(Method method, std::span<const uint32_t> servers,
                                     std::vector<Parts> requests, Deadline deadline);
  // The same with one request for all servers.
  StatusOr<std::vector<Buffer>> CallEvery(Method method, const std::vector<std::byte>& body,
                                          Deadline deadline);
  // For methods whose replies have no body.
  Status ExpectEmpty(std::span<const uint32_t> servers, StatusOr<std::vector<Buffer>> replies);

  std::vector<uint32_t> AllServers() const;

  void Close() {
    for (const auto& channel : channels_) channel->Close();
  }

 private:
  std::vector<std::shared_ptr<PrefetchHints>> hints_;  // by server, as channels
  std::vector<std::unique_ptr<net::Channel>> channels_;
};

StatusOr<std::vector<Buffer>> RemoteRows::Impl::Call(Method method,
                                                     std::span<const uint32_t> servers,
                                                     std::vector<Parts> requests,
                                                     Deadline deadline) {
  std::vector<OutgoingCall> calls;
  for (size_t i = 0; i < servers.size(); ++i) {
    calls.push_back({channels_[servers[i]].get(), std::move(requests[i])});
  }
  auto replies = CallAll(method, std::move(calls), deadline);
  PERSIA_RETURN_IF_ERROR(FirstFailure(replies));
  std::vector<Buffer> bodies;
  for (auto& reply : replies) bodies.push_back(std::move(reply).value());
  return bodies;
}

StatusOr<std::vector<Buffer>> RemoteRows::Impl::CallEvery(Method method,
                                                          const std::vector<std::byte>& body,
                                                          Deadline deadline) {
  std::vector<Parts> requests(channels_.size());
  for (Parts& parts : requests) parts.AddView(body);
  return Call(method, AllServers(), std::move(requests), deadline);
}

Status RemoteRows::Impl::ExpectEmpty(std::span<const uint32_t> servers,
                                     StatusOr<std::vector<Buffer>> replies) {
  if (!replies.ok()) return replies.status();
  for (size_t i = 0; i < servers.size(); ++i) {
    const Status empty = RequireEmpty(replies.value()[i].span(), "a reply");
    if (!empty.ok()) return BadReply(servers[i], empty);
  }
  return Status::Ok();
}

std::vector<uint32_t> RemoteRows::Impl::AllServers() const {
  std::vector<uint32_t> servers;
  for (uint32_t i = 0; i < num_servers(); ++i) servers.push_back(i);
  return servers;
}

RemoteRows::RemoteRows(uint32_t num_servers) : impl_(std::make_unique<Impl>(num_servers)) {}
RemoteRows::~RemoteRows() = default;

Status RemoteRows::SetServer(uint32_t index, const std::string& address) {
  if (index >= num_servers()) {
    return InvalidArgument("parameter server " + std::to_string(index) + ": there are only " +
                           std::to_string(num_servers()) + ", counted from 0");
  }
  impl_->channel(index).SetAddress(address);
  impl_->hints(index)->Forget();
  return Status::Ok();
}

void RemoteRows::Close() { impl_->Close(); }

std::vector<net::ChannelStats> RemoteRows::channel_stats() const {
  std::vector<net::ChannelStats> stats;
  for (uint32_t i = 0; i < num_servers(); ++i) stats.push_back(impl_->channel(i).stats());
  return stats;
}

uint32_t RemoteRows::num_servers() const { return impl_->num_servers(); }

Status RemoteRows::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  const auto body = EncodeConfigureRequest(config, replace);
  return impl_->ExpectEmpty(impl_->AllServers(),
                            impl_->CallEvery(Method::kConfigureServer, body, deadline));
}

StatusOr<std::vector<ServerRows>> RemoteRows::Lookup(std::span<const ServerBlocks> requests,
                                                     bool train, Deadline deadline) {
  std::vector<uint32_t> servers;
  std::vector<Parts> parts;
  for (uint32_t i = 0; i < requests.size(); ++i) {
    if (requests[i].signs.empty()) continue;
    servers.push_back(i);
    parts.push_back(LookupRequest(requests[i], train));
  }
  auto replies = impl_->Call(Method::kLookupRows, servers, std::move(parts), deadline);
  if (!replies.ok()) return replies.status();
  std::vector<ServerRows> rows(requests.size());
  for (size_t i = 0; i < servers.size(); ++i) {
    const uint32_t server = servers[i];
    auto decoded = DecodeRows(std::move(replies.value()[i]), requests[server].num_floats());
    if (!decoded.ok()) return BadReply(server, decoded.status());
    rows[server] = std::move(decoded).value();
  }
  return rows;
}

Announced RemoteRows::Prefetch(std::span<const ServerBlocks> requests) {
  Announced total;
  for (uint32_t i = 0; i < requests.size(); ++i) {
    const Announced sent =
        PrefetchHints::Send(impl_->hints(i), requests[i].signs, &impl_->channel(i));
    total.num_signs += sent.num_signs;
    total.num_dropped += sent.num_dropped;
  }
  return total;
}

bool RemoteRows::WantsPrefetch() {
  bool is_wanted = false;
  for (uint32_t i = 0; i < num_servers(); ++i) {
    is_wanted |= PrefetchHints::IsWanted(impl_->hints(i), &impl_->channel(i));
  }
  return is_wanted;
}

StatusOr<UpdateResult> RemoteRows::Update(UpdateKey key, std::span<const ServerUpdate> updates,
                                          Deadline deadline) {
  std::vector<uint32_t> servers;
  std::vector<Parts> parts;
  for (uint32_t i = 0; i < updates.size(); ++i) {
    if (updates[i].blocks == nullptr || updates[i].blocks->signs.empty()) continue;
    servers.push_back(i);
    parts.push_back(UpdateRequest(key, updates[i]));
  }
  auto replies = impl_->Call(Method::kUpdateRows, servers, std::move(parts), deadline);
  if (!replies.ok()) return replies.status();
  UpdateResult sum;
  for (size_t i = 0; i < servers.size(); ++i) {
    auto reply = DecodeUpdateReply(replies.value()[i].span());
    if (!reply.ok()) return BadReply(servers[i], reply.status());
    AddUpdate(updates[servers[i]], {reply->staleness, reply->num_updated, reply->num_missing},
              &sum);
  }
  return sum;
}

Status RemoteRows::SetRows(std::span<const ServerBlocks> requests,
                           std::span<const std::span<const float>> rows, Deadline deadline) {
  std::vector<uint32_t> servers;
  std::vector<Parts> parts;
  for (uint32_t i = 0; i < requests.size(); ++i) {
    if (requests[i].signs.empty()) continue;
    servers.push_back(i);
    parts.push_back(SetRowsRequest(requests[i], rows[i]));
  }
  return impl_->ExpectEmpty(servers,
                            impl_->Call(Method::kSetRows, servers, std::move(parts), deadline));
}

Status RemoteRows::Clear(Deadline deadline) {
  return impl_->ExpectEmpty(impl_->AllServers(),
                            impl_->CallEvery(Method::kClearRows, {}, deadline));
}

StatusOr<std::vector<uint64_t>> RemoteRows::Sizes(Deadline deadline) {
  auto replies = impl_->CallEvery(Method::kCountRows, {}, deadline);
  if (!replies.ok()) return replies.status();
  std::vector<uint64_t> sizes;
  for (uint32_t i = 0; i < num_servers(); ++i) {
    auto num_rows = DecodeFixed<uint64_t>(replies.value()[i].span(), "a CountRows reply");
    if (!num_rows.ok()) return BadReply(i, num_rows.status());
    sizes.push_back(*num_rows);
  }
  return sizes;
}

}  // namespace persia::worker

#include "net/client_connection.h"

#include <utility>

#include "net/address.h"

namespace persia::net {
namespace {

// An address behind which nobody refuses (a dropped
// route) must not hold up the change to a better one.
constexpr std::chrono::seconds kConnectTimeout{5};

}  // namespace

ClientConnection::ClientConnection(asio::io_context& io, Listener* listener,
                                   uint64_t max_body_bytes)
    : listener_(listener),
      max_body_bytes_(max_body_bytes),
      resolver_(io),
      socket_(io),
      connect_timer_(io) {}

// Wraps a completion handler, whatever its second argument: it keeps the connection alive, and runs
// only while open.
template <typename Function>
auto ClientConnection::WhileOpen(const char* doing, Function function) {
  return [self = shared_from_this(), doing, function = std::move(function)](ErrorCode error,
                                                                            auto&&... results) {
    if (self->listener_ == nullptr) return;
    if (error == asio::error::eof) return self->Break("the peer closed the connection");
    if (error) return self->Break(doing + error.message());
    function(results...);
  };
}

void ClientConnection::Connect(const std::string& address) {
  connect_timer_.expires_after(kConnectTimeout);
  connect_timer_.async_wait([self = shared_from_this()](ErrorCode error) {
    if (!error && self->listener_ != nullptr) self->Break("connecting timed out");
  });
  auto parsed = ParseAddress(address);
  if (!parsed.ok()) {
    asio::post(socket_.get_executor(),
               [self = shared_from_this(), reason = parsed.status().message()] {
                 if (self->listener_ != nullptr) self->Break(reason);
               });
    return;
  }
  ErrorCode not_literal;
  const auto literal = asio::ip::make_address(parsed->host, not_literal);
  if (not_literal) return Resolve(parsed->host, parsed->port);
  ConnectTo({Tcp::endpoint(literal, parsed->port)});
}

// Asio resolves names on a thread of its own.
void ClientConnection::Resolve(const std::string& host, uint16_t port) {
  resolver_.async_resolve(
      host, std::to_string(port),
      WhileOpen("resolving the name: ", [this](const Tcp::resolver::results_type& results) {
        std::vector<Tcp::endpoint> endpoints;
        for (const auto& entry : results) endpoints.push_back(entry.endpoint());
        ConnectTo(std::move(endpoints));
      }));
}

void ClientConnection::ConnectTo(std::vector<Tcp::endpoint> endpoints) {
  asio::async_connect(socket_, endpoints,
                      WhileOpen("", [this](const Tcp::endpoint&) { OnConnected(); }));
}

void ClientConnection::OnConnected() {
  connect_timer_.cancel();
  ConfigureSocket(socket_);
  ReadHeader();
  listener_->OnConnected();
}

void ClientConnection::ReadHeader() {
  asio::async_read(socket_, asio::buffer(in_header_bytes_), WhileOpen("", [this](size_t) {
                     auto header = DecodeHeader(in_header_bytes_, max_body_bytes_);
                     if (!header.ok()) return Break(header.status().message());
                     if (header->kind != FrameKind::kReply || header->version != kVersion) {
                       return Break("the peer sent a frame that is no reply of version 1");
                     }
                     in_header_ = *header;
                     ReadBody();
                   }));
}

void ClientConnection::ReadBody() {
  in_body_ = Buffer(in_header_.body_bytes);
  asio::async_read(socket_, asio::buffer(in_body_.data(), in_body_.size()),
                   WhileOpen("", [this](size_t) {
                     const FrameHeader header = in_header_;
                     Buffer body = std::move(in_body_);
                     ReadHeader();
                     listener_->OnReply(header, std::move(body));
                   }));
}

void ClientConnection::Write(const FrameHeader& header, const Parts& parts) {
  EncodeHeader(header, out_header_);
  asio::async_write(socket_, GatherFrame(out_header_, parts),
                    WhileOpen("", [this](size_t) { listener_->OnWritten(); }));
}

void ClientConnection::Break(const std::string& reason) {
  Listener* listener = listener_;
  Close();
  listener->OnBroken(reason);
}

void ClientConnection::Close() {
  listener_ = nullptr;
  ErrorCode ignored;
  socket_.close(ignored);
  resolver_.cancel();
  connect_timer_.cancel();
}

}  // namespace persia::net

#include "net/client_connection.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <utility>

namespace persia::net {
namespace {

// Of resolving a name, and of what follows the connection of the socket.
constexpr std::chrono::seconds kStepTimeout{5};
// Of the socket to one address, behind which there may be no refusal (a dropped route). The kernel
// tries again after 1, 3 and 7 s: a new socket finds a network that was mended sooner.
constexpr std::chrono::milliseconds kSocketTimeout{1500};
// A cut may leave no trace but that nothing is acknowledged, and the kernel then sends at 0.2, 0.6,
// 1.4, 3, 6.2, 12.6 and 25.4 s. After so many intervals a new connection is tried instead.
constexpr std::chrono::seconds kSilenceInterval{1};
constexpr int kMostSilentIntervals = 3;
// Of a challenge, or of a refusal: a peer that has proved nothing must not make this end take more.
constexpr uint64_t kMaxHandshakeBytes = 4096;

}  // namespace

StatusOr<Address> ParseAddress(const std::string& text) {
  const auto refuse = [&text](const char* why) {
    return InvalidArgument("address '", text, "' ", why, "; write host:port");
  };
  // The last colon: an IPv6 address has colons of its own.
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return refuse("has no host or no port");
  Address address;
  const char* begin = text.data() + colon + 1;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, address.port);
  if (error != std::errc() || stop != end || address.port == 0) {
    return refuse("has a port that is not 1 to 65535");
  }
  address.host = text.substr(0, colon);
  if (address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  if (address.host.empty()) return refuse("has no host");
  return address;
}

ClientConnection::ClientConnection(asio::io_context& io, Listener* listener,
                                   uint64_t max_body_bytes, const Security& security)
    : listener_(listener),
      max_body_bytes_(max_body_bytes),
      security_(security),
      resolver_(io),
      socket_(io),
      connect_timer_(io),
      silence_timer_(io) {}

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
  LimitTime(kStepTimeout, /*has_next=*/false);
  // Reported from the event loop, like every other failure: the listener is not called from within
  // Connect().
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

// Of the present step; replaces the limit of the one before. `has_next`: the attempt ends, and the
// next address is tried.
void ClientConnection::LimitTime(std::chrono::milliseconds limit, bool has_next) {
  connect_timer_.expires_after(limit);
  connect_timer_.async_wait(
      [self = shared_from_this(), has_next, step = ++connect_step_](ErrorCode cancelled) {
        // A handler that was due when the step ended cannot be cancelled any more.
        if (cancelled || self->listener_ == nullptr || step != self->connect_step_) return;
        if (!has_next) return self->Break("connecting timed out");
        ErrorCode ignored;
        self->socket_.close(ignored);
      });
}

void ClientConnection::EndTimeLimit() {
  ++connect_step_;
  connect_timer_.cancel();
}

// Asio resolves names on a thread of its own.
void ClientConnection::Resolve(const std::string& host, uint16_t port) {
  resolver_.async_resolve(
      host, std::to_string(port),
      WhileOpen("resolving the name: ", [this](const Tcp::resolver::results_type& results) {
        std::vector<Tcp::endpoint> endpoints;
        for (const auto& entry : results) endpoints.push_back(entry.endpoint());
        if (endpoints.empty()) return Break("resolving the name: it has no address");
        ConnectTo(std::move(endpoints));
      }));
}

// To the first endpoint that answers. Not by asio::async_connect, which opens the sockets itself.
void ClientConnection::ConnectTo(std::vector<Tcp::endpoint> endpoints) {
  const Tcp::endpoint endpoint = endpoints.front();
  endpoints.erase(endpoints.begin());
  ErrorCode ignored;  // it shows again when the socket is connected
  socket_.close(ignored);
  socket_.open(endpoint.protocol(), ignored);
  if (IsLoopback(endpoint.address())) AvoidPacing(socket_.native_handle());
  LimitTime(kSocketTimeout, /*has_next=*/!endpoints.empty());
  socket_.async_connect(endpoint,
                        [self = shared_from_this(), rest = std::move(endpoints),
                         then = WhileOpen("", [this] { OnConnected(); })](ErrorCode error) mutable {
                          if (error && !rest.empty() && self->listener_ != nullptr)
                            return self->ConnectTo(std::move(rest));
                          then(error);
                        });
}

void ClientConnection::OnConnected() {
  LimitTime(kStepTimeout, /*has_next=*/false);
  ConfigureSocket(socket_.native_handle());
  DetectCuts(socket_.native_handle());
  if (security_.tls == nullptr) return StartFrames();
  tls_ = std::make_unique<TlsStream>(security_.tls->Context(), socket_.native_handle(),
                                     TlsStream::Side::kClient);
  socket_.native_non_blocking(true);
  HandshakeTls();
}

void ClientConnection::HandshakeTls() {
  const ssize_t done = tls_->Handshake();
  if (done > 0) return StartFrames();
  if (done == 0 || errno != EAGAIN) return OnTlsFailed(done);
  socket_.async_wait(Tcp::socket::wait_read, WhileOpen("", [this] { HandshakeTls(); }));
}

// What the peer does not accept shows when it is first read from: its end of the handshake is the
// last one. Later, it is a connection that has broken.
void ClientConnection::OnTlsFailed(ssize_t received) {
  const std::string reason = tls_->Error();
  if (!reason.empty() && !tls_->HasRead()) return Refuse("TLS: " + reason + "; " + TlsRemedy());
  if (!reason.empty()) return Break("TLS: " + reason);
  if (received != 0) return Break(std::system_category().message(errno));
  Break(tls_->HasRead() ? "the peer closed the connection"
                        : "the peer closed the connection before TLS was set up; does it use TLS?");
}

void ClientConnection::StartFrames() {
  ReadSome();
  if (security_.identity == nullptr) return Finish();
  SendHello();
}

void ClientConnection::Finish() {
  EndTimeLimit();
  listener_->OnConnected();
}

// ---- the handshake

void ClientConnection::SendHello() {
  handshake_.emplace(*security_.identity, tls_ != nullptr ? tls_->Binding() : ChannelBinding{});
  SendHandshake(EncodeMessage(handshake_->hello()));
}

// The socket's buffer is empty but for these: what does not fit has failed.
void ClientConnection::SendHandshake(Segments message) {
  FrameHeader header;
  header.method = kAuthenticate.number;
  if (FrameWriter(header, message).Write(socket_.native_handle(), tls_.get()) !=
      FrameWriter::Result::kDone) {
    Break(std::system_category().message(errno));
  }
}

// The server does not answer the proof: calls may follow it at once.
void ClientConnection::OnChallenge(const Buffer& body) {
  const auto proof = handshake_->Answer(body.span());
  if (!proof.ok()) return Refuse(proof.status().message());
  handshake_.reset();
  SendHandshake(EncodeMessage(proof.value()));
  if (listener_ != nullptr) Finish();
}

// A reply about the connection, not about a call, has the method of the handshake.
bool ClientConnection::TakeReply(const FrameHeader& header, Buffer body) {
  if (header.status != 0 && (handshake_.has_value() || header.method == kAuthenticate.number)) {
    Refuse(std::string(reinterpret_cast<const char*>(body.data()), body.size()));
  } else if (handshake_.has_value()) {
    OnChallenge(body);
  } else {
    listener_->OnReply(header, std::move(body));
  }
  return listener_ != nullptr;
}

// ---- reading

void ClientConnection::ReadSome() {
  Receive(asio::buffer(ahead_) + num_ahead_, [this](size_t num_bytes) {
    num_ahead_ += num_bytes;
    TakeFrames();
  });
}

template <typename Function>
void ClientConnection::Receive(asio::mutable_buffer to, Function then) {
  if (tls_ != nullptr) return ReceiveTls(to, then);
  socket_.async_read_some(to, WhileOpen("", then));
}

// Takes what is there, of any number of records, before it waits.
template <typename Function>
void ClientConnection::ReceiveTls(asio::mutable_buffer to, Function then) {
  auto* bytes = static_cast<std::byte*>(to.data());
  size_t num_bytes = 0;
  ssize_t received = 1;
  while (received > 0 && num_bytes < to.size()) {
    received = tls_->Read(bytes + num_bytes, to.size() - num_bytes);
    if (received > 0) num_bytes += static_cast<size_t>(received);
  }
  const bool blocked = received < 0 && errno == EAGAIN;
  if (num_bytes == 0 && blocked) {
    socket_.async_wait(Tcp::socket::wait_read,
                       WhileOpen("", [this, to, then] { ReceiveTls(to, then); }));
    return;
  }
  asio::post(socket_.get_executor(),
             [self = shared_from_this(), this, num_bytes, received, then, error = errno]() mutable {
               if (listener_ == nullptr) return;
               if (num_bytes > 0) return then(num_bytes);  // a failure shows again
               errno = error;
               OnTlsFailed(received);
             });
}

// Reports the replies that are complete in ahead_, and goes on reading the one that is not.
void ClientConnection::TakeFrames() {
  std::span<const std::byte> rest(ahead_.data(), num_ahead_);
  while (rest.size() >= kHeaderBytes) {
    const uint64_t max_bytes =
        handshake_.has_value() ? std::min(kMaxHandshakeBytes, max_body_bytes_) : max_body_bytes_;
    auto header = DecodeHeader(rest.first<kHeaderBytes>(), max_bytes);
    if (!header.ok()) return Break(header.status().message());
    if (header->kind != FrameKind::kReply || header->version != kVersion) {
      return Break("the peer sent a frame that is no reply of version " + std::to_string(kVersion));
    }
    rest = rest.subspan(kHeaderBytes);
    in_header_ = *header;
    if (header->body_bytes > rest.size()) return ReadBody(rest);
    Buffer body(header->body_bytes);
    std::copy_n(rest.data(), body.size(), body.data());
    rest = rest.subspan(body.size());
    if (!TakeReply(*header, std::move(body))) return;
  }
  std::memmove(ahead_.data(), rest.data(), rest.size());
  num_ahead_ = rest.size();
  ReadSome();
}

void ClientConnection::ReadBody(std::span<const std::byte> begun) {
  in_body_ = Buffer(in_header_.body_bytes);
  std::copy_n(begun.data(), begun.size(), in_body_.data());
  num_ahead_ = 0;
  ReadRest(begun.size());
}

void ClientConnection::ReadRest(size_t num_received) {
  Receive(asio::buffer(in_body_.data(), in_body_.size()) + num_received,
          [this, num_received](size_t num_bytes) {
            const size_t sum = num_received + num_bytes;
            if (sum < in_body_.size()) return ReadRest(sum);
            if (TakeReply(in_header_, std::move(in_body_))) ReadSome();
          });
}

// ---- writing

// Tried at once, without the event loop: most requests fit into the buffer of the socket, and the
// caller then needs one system call for its request and one for its reply.
bool ClientConnection::Write(const FrameHeader& header, const Segments& segments) {
  out_.emplace(header, segments);
  WatchSilence();
  write_waits_ = out_->Write(socket_.native_handle(), tls_.get()) != FrameWriter::Result::kDone;
  if (!write_waits_) return true;
  // Also after a failure: it shows again, from the event loop.
  socket_.async_wait(Tcp::socket::wait_write, WhileOpen("", [this] { WriteRest(); }));
  return false;
}

void ClientConnection::WriteRest() {
  WatchSilence();
  const FrameWriter::Result result = out_->Write(socket_.native_handle(), tls_.get());
  write_waits_ = result == FrameWriter::Result::kBlocked;
  switch (result) {
    case FrameWriter::Result::kDone: return listener_->OnWritten();
    case FrameWriter::Result::kBroken: return Break(std::system_category().message(errno));
    case FrameWriter::Result::kBlocked:
      socket_.async_wait(Tcp::socket::wait_write, WhileOpen("", [this] { WriteRest(); }));
  }
}

// While bytes are not acknowledged, or wait for room at the peer. What is acknowledged and not
// answered is watched by the kernel (DetectCuts).
void ClientConnection::WatchSilence() {
  if (watches_silence_) return;
  watches_silence_ = true;
  silence_timer_.expires_after(kSilenceInterval);
  silence_timer_.async_wait([self = shared_from_this()](ErrorCode cancelled) {
    self->watches_silence_ = false;
    if (!cancelled && self->listener_ != nullptr) self->CheckSilence();
  });
}

void ClientConnection::CheckSilence() {
  const Unacknowledged sent = UnacknowledgedBy(socket_.native_handle());
  if (!sent.any || sent.silence < kSilenceInterval) num_silent_intervals_ = 0;
  if (!sent.any && !write_waits_) return;
  if (sent.any && sent.silence >= kSilenceInterval &&
      ++num_silent_intervals_ == kMostSilentIntervals) {
    return Break("the host of the peer does not answer");
  }
  WatchSilence();
}

void ClientConnection::Break(const std::string& reason) {
  Listener* listener = listener_;
  Close();
  listener->OnBroken(reason);
}

void ClientConnection::Refuse(const std::string& reason) {
  Listener* listener = listener_;
  Close();
  listener->OnRefused(reason);
}

void ClientConnection::Close() {
  listener_ = nullptr;
  ErrorCode ignored;
  socket_.close(ignored);
  resolver_.cancel();
  connect_timer_.cancel();
  silence_timer_.cancel();
}

}  // namespace persia::net

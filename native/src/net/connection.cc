#include "net/connection.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace persia::net {
namespace {

constexpr uint32_t kMaxUnanswered = 1024;
constexpr uint64_t kMaxOutgoingBytes = 64ull << 20;
constexpr size_t kScratchBytes = 64 * 1024;
// After our side is shut down the client closes its own; this long we wait for one that does not.
constexpr std::chrono::milliseconds kLinger{500};
// A body has until its request's deadline to arrive, and at least this.
constexpr std::chrono::seconds kMinBodyTime{1};

Status Refusal(const FrameHeader& header) {
  if (header.version != kVersion) {
    return InvalidArgument("protocol version " + std::to_string(header.version) +
                           " is not spoken here; this side speaks version " +
                           std::to_string(kVersion));
  }
  return InvalidArgument("method " + std::to_string(header.method) +
                         " is not known here; is this the right server?");
}

std::vector<std::byte> ToBytes(const std::string& text) {
  const auto* p = reinterpret_cast<const std::byte*>(text.data());
  return {p, p + text.size()};
}

}  // namespace

Connection::Connection(Tcp::socket socket, ServerState& server)
    : server_(server), socket_(std::move(socket)), close_timer_(socket_.get_executor()) {}

// Wraps a completion handler: it keeps the connection alive, and runs only while that is open.
template <typename Function>
auto Connection::OnStrand(Function function) {
  return [self = shared_from_this(), function = std::move(function)](ErrorCode error,
                                                                     size_t num_bytes) mutable {
    if (self->closed_) return;
    if (error) return self->CloseNow();
    function(num_bytes);
  };
}

void Connection::Start() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    if (self->closed_) return;
    ConfigureSocket(self->socket_);
    self->ContinueReading();
  });
}

void Connection::Drain() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->draining_ = true;
    self->MaybeFinishDrain();
  });
}

void Connection::CloseNow() {
  if (closed_) return;
  closed_ = true;
  ErrorCode ignored;
  socket_.close(ignored);
  close_timer_.cancel();
  outgoing_.clear();
  body_ = Buffer();
  body_lease_ = ByteLease();
  server_.on_closed(this);
}

// ---- reading

// Called whenever something that could have stopped the reading has changed.
void Connection::ContinueReading() {
  if (reading_ || closed_) return;
  if (draining_) return MaybeFinishDrain();
  if (num_unanswered_ < kMaxUnanswered && outgoing_bytes_ < kMaxOutgoingBytes) ReadHeader();
}

void Connection::ReadHeader() {
  reading_ = true;
  asio::async_read(socket_, asio::buffer(header_bytes_), OnStrand([this](size_t) { OnHeader(); }));
}

void Connection::OnHeader() {
  reading_ = false;
  if (draining_) return ContinueReading();
  received_at_ = Clock::now();
  auto header = DecodeHeader(header_bytes_, server_.options.max_body_bytes);
  // The stream is lost: what follows cannot be told from a header.
  if (!header.ok() || header->kind != FrameKind::kRequest) return CloseNow();
  if (header->version != kVersion || !server_.handlers[header->method]) {
    return SkipBody(*header, header->body_bytes, Refusal(*header));
  }
  AcquireBody(*header);
}

Clock::time_point Connection::DeadlineOf(const FrameHeader& header) const {
  return received_at_ + std::chrono::milliseconds(header.deadline_ms);
}

void Connection::AcquireBody(const FrameHeader& header) {
  reading_ = true;
  auto granted = [self = shared_from_this(), header] {
    asio::post(self->socket_.get_executor(), [self, header] {
      ByteLease lease(&self->server_.budget, header.body_bytes);
      if (self->closed_) return;
      if (self->draining_) {
        self->reading_ = false;
        return self->ContinueReading();
      }
      self->body_lease_ = std::move(lease);
      self->ReadBody(header);
    });
  };
  if (!server_.budget.Acquire(header.body_bytes, std::move(granted))) return;
  body_lease_ = ByteLease(&server_.budget, header.body_bytes);
  ReadBody(header);
}

void Connection::ReadBody(const FrameHeader& header) {
  body_ = Buffer(header.body_bytes);
  // A client that announces a body and does not send it
  // would keep its share of the budget from the others.
  CloseAt(std::max(DeadlineOf(header), Clock::now() + kMinBodyTime));
  asio::async_read(socket_, asio::buffer(body_.data(), body_.size()),
                   OnStrand([this, header](size_t) {
                     reading_ = false;
                     if (!draining_) {
                       close_timer_.cancel();
                       Dispatch(header);
                     }
                     ContinueReading();
                   }));
}

void Connection::SkipBody(const FrameHeader& header, uint64_t remaining_bytes, Status refusal) {
  if (remaining_bytes == 0) {
    reading_ = false;
    ++num_unanswered_;
    Reply(header, std::move(refusal));
    return ContinueReading();
  }
  reading_ = true;
  scratch_.resize(kScratchBytes);
  const size_t size = std::min<uint64_t>(remaining_bytes, kScratchBytes);
  asio::async_read(
      socket_, asio::buffer(scratch_.data(), size),
      OnStrand([this, header, remaining_bytes, refusal = std::move(refusal)](size_t num_bytes) {
        SkipBody(header, remaining_bytes - num_bytes, refusal);
      }));
}

// ---- running

void Connection::Dispatch(const FrameHeader& header) {
  ++num_unanswered_;
  const CallContext context{DeadlineOf(header)};
  asio::post(*server_.pool, [self = shared_from_this(), header, context, request = std::move(body_),
                             lease = std::move(body_lease_)] {
    auto reply = self->RunHandler(header, request, context);
    asio::post(self->socket_.get_executor(), [self, header, reply = std::move(reply)]() mutable {
      self->Reply(header, std::move(reply));
    });
  });
}

StatusOr<Parts> Connection::RunHandler(const FrameHeader& header, const Buffer& request,
                                       const CallContext& context) const {
  if (Clock::now() >= context.deadline) {
    return DeadlineExceeded("the deadline passed before the request's turn came");
  }
  // Our handlers do not throw, but what they use may (an
  // allocation, say); one request must not end the process.
  try {
    return server_.handlers[header.method](request, context);
  } catch (const std::exception& e) {
    return Internal("method " + std::to_string(header.method) + ": " + e.what());
  }
}

// ---- writing

void Connection::Reply(const FrameHeader& request, StatusOr<Parts> reply) {
  if (closed_) return;
  if (reply.ok() && reply->size_bytes() > server_.options.max_body_bytes) {
    // Not kResourceExhausted: trying again would not help.
    reply = InvalidArgument(
        "a reply of " + std::to_string(reply->size_bytes()) + " bytes is above the limit of " +
        std::to_string(server_.options.max_body_bytes) + "; ask for less at once");
  }
  OutgoingFrame frame;
  if (reply.ok()) {
    frame.body = std::move(reply).value();
  } else {
    frame.body.AddOwned(ToBytes(reply.status().message()));
  }
  FrameHeader header = request;
  header.version = kVersion;
  header.kind = FrameKind::kReply;
  header.status = static_cast<uint8_t>(reply.status().code());
  header.deadline_ms = 0;
  header.reserved = 0;
  header.body_bytes = frame.body.size_bytes();
  EncodeHeader(header, frame.header);
  frame.size_bytes = header.body_bytes;
  outgoing_bytes_ += frame.size_bytes;
  outgoing_.push_back(std::move(frame));
  if (outgoing_.size() == 1) WriteNext();
}

void Connection::WriteNext() {
  const OutgoingFrame& frame = outgoing_.front();
  asio::async_write(socket_, GatherFrame(frame.header, frame.body), OnStrand([this](size_t) {
                      outgoing_bytes_ -= outgoing_.front().size_bytes;
                      outgoing_.pop_front();
                      --num_unanswered_;
                      if (!outgoing_.empty()) WriteNext();
                      ContinueReading();
                      MaybeFinishDrain();  // also when a read is still pending
                    }));
}

// ---- ending

void Connection::CloseAt(Clock::time_point time) {
  close_timer_.expires_at(time);
  close_timer_.async_wait([self = shared_from_this()](ErrorCode cancelled) {
    if (!cancelled) self->CloseNow();
  });
}

// Closing a socket with unread bytes in it resets the connection and takes away replies that are
// still on their way. So our side is shut down first, and what the client sends is read and dropped
// until it closes too. It repeats the dropped requests elsewhere: they were never begun.
void Connection::MaybeFinishDrain() {
  if (!draining_ || closed_ || num_unanswered_ > 0) return;
  if (!finished_) {
    finished_ = true;
    ErrorCode ignored;
    socket_.shutdown(Tcp::socket::shutdown_send, ignored);
    CloseAt(Clock::now() + kLinger);
  }
  if (!reading_) Discard();
}

void Connection::Discard() {
  reading_ = true;
  scratch_.resize(kScratchBytes);
  socket_.async_read_some(asio::buffer(scratch_), OnStrand([this](size_t) { Discard(); }));
}

}  // namespace persia::net

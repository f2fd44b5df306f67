#include "net/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "net/asio.h"
#include "net/audit.h"

namespace persia::net {
namespace {

// One connection may not hold the budget of the server: these bound what it has begun and not
// taken.
constexpr uint32_t kMaxUnanswered = 1024;
constexpr uint64_t kMaxHeldBytes = 64ull << 20;
constexpr size_t kScratchBytes = 64 * 1024;
constexpr int kMaxDiscards = 16;  // of kScratchBytes, for one event
// After our side is shut down the client closes its own; this long we wait for one that does not.
constexpr std::chrono::milliseconds kLinger{500};
// A body has until its request's deadline to arrive, and at least this; each step of it has the
// server's patience.
constexpr std::chrono::seconds kMinBodyTime{1};
// The first step is small, because it is copied when the rest follows: below what Buffer takes from
// its kept blocks, which are few and have one lock.
constexpr uint64_t kFirstStepBytes = 60 << 10;
constexpr uint64_t kStepBytes = 512 << 10;

std::unique_ptr<TlsStream> MakeTls(const Security& security, int fd) {
  if (security.tls == nullptr) return nullptr;
  return std::make_unique<TlsStream>(security.tls->Context(), fd, TlsStream::Side::kServer);
}

}  // namespace

Connection::Connection(UniqueFd socket, uint64_t tag, std::string peer, ServerState& server)
    : server_(server),
      socket_(std::move(socket)),
      tag_(tag),
      peer_(std::move(peer)),
      tls_(MakeTls(server.options.security, socket_.get())) {
  if (server.options.security.identity != nullptr) handshake_.emplace();
}

void Connection::Start() {
  ConfigureSocket(socket_.get());
  Lock lock(mutex_);
  if (handshake_.has_value() || tls_ != nullptr)
    CloseAt(Clock::now() + server_.options.handshake_patience);
  UpdateInterest();
}

void Connection::OnReady(uint32_t events) {
  Lock lock(mutex_);
  armed_ = 0;
  if (closed_) return;
  const uint32_t failures = EPOLLERR | EPOLLHUP;  // a read or a write will say which
  if ((events & (EPOLLOUT | failures)) != 0 && write_blocked_) {
    write_blocked_ = false;
    Flush(lock);
  }
  const bool readable = (events & (EPOLLIN | failures)) != 0 || HasPending();
  if (readable && MayRead()) return Read(std::move(lock));
  UpdateInterest();
}

bool Connection::MayRead() const {
  if (reading_ || closed_) return false;
  if (draining_) return num_unanswered_ == 0;  // the client's end of the stream is waited for
  return num_unanswered_ < kMaxUnanswered && held_bytes_ < kMaxHeldBytes;
}

// Called whenever something that decides what we wait for has changed.
void Connection::UpdateInterest() {
  if (closed_) return;
  // The socket does not tell of what TLS has read ahead; that it can be written to, it tells at
  // once.
  const bool wants_write = write_blocked_ || (MayRead() && HasPending());
  const uint32_t wanted = (MayRead() ? EPOLLIN : 0u) | (wants_write ? EPOLLOUT : 0u);
  if ((wanted & ~armed_) == 0) return;  // more than is wanted does no harm
  armed_ = wanted;
  server_.poller.Arm(socket_.get(), tag_, wanted);
}

// ---- reading

void Connection::Read(Lock lock) {
  reading_ = true;
  UpdateInterest();  // a write may be waiting besides
  const bool discarding = draining_;
  lock.unlock();
  const Progress progress = discarding ? DiscardAll() : ReadFrame();
  if (progress == Progress::kAwaitsBudget) return;  // OnGranted() goes on, or has already done so
  lock.lock();
  if (progress == Progress::kFrame && !draining_ && !closed_) return FinishFrame(std::move(lock));
  reading_ = false;
  if (progress == Progress::kBroken && !discarding) ReportUnprovenEnd();
  if (progress == Progress::kBroken) Close();
  if (closed_) return;
  if (draining_) {
    MaybeFinishDrain();
  } else if (phase_ == Phase::kBody && timed_step_ != num_granted_) {
    const auto now = Clock::now();
    timed_step_ = num_granted_;
    CloseAt(
        std::min(std::max(Deadline(), now + kMinBodyTime), now + server_.options.body_patience));
  }
  UpdateInterest();
}

// Goes on where the last call had to stop, until the frame is there.
Connection::Progress Connection::ReadFrame() {
  Progress progress = Progress::kFrame;
  if (phase_ == Phase::kHeader) {
    progress = Receive(header_bytes_.data(), kHeaderBytes);
    if (progress == Progress::kFrame) progress = BeginBody();
  }
  if (progress != Progress::kFrame || phase_ == Phase::kUnproven) return progress;
  if (phase_ == Phase::kHandshake) return Receive(handshake_bytes_.data(), header_.body_bytes);
  return phase_ == Phase::kRefusedBody ? SkipBody() : ReceiveBody();
}

// The header is there: kFrame when its body may be read.
Connection::Progress Connection::BeginBody() {
  received_at_ = Clock::now();
  auto header = DecodeHeader(header_bytes_, server_.options.max_body_bytes);
  // The stream is lost: what follows cannot be told from a header.
  if (!header.ok() || header->kind != FrameKind::kRequest) return Progress::kBroken;
  header_ = *header;
  num_received_ = 0;
  phase_ = BodyPhase();
  num_granted_ = 0;
  return Progress::kFrame;
}

// From the header alone: the body of what is refused is never decoded.
Connection::Phase Connection::BodyPhase() const {
  if (handshake_.has_value()) {
    const bool awaited = header_.version == kVersion && header_.method == kAuthenticate.number &&
                         header_.body_bytes == handshake_->wanted_bytes();
    return awaited ? Phase::kHandshake : Phase::kUnproven;
  }
  return Refusal().ok() ? Phase::kBody : Phase::kRefusedBody;
}

// Why the request that header_ announces is not handled; Ok: it is.
Status Connection::Refusal() const {
  if (header_.version != kVersion) {
    return InvalidArgument("protocol version ", header_.version,
                           " is not spoken here; this side speaks version ", kVersion);
  }
  const bool has_identity = server_.options.security.identity != nullptr;
  if (header_.method == kAuthenticate.number && !has_identity) {
    return PermissionDenied("the server has no identity, and its caller has one; ",
                            CredentialsRemedy());
  }
  if (!server_.handlers[header_.method]) {
    return InvalidArgument("method ", header_.method,
                           " is not known here; is this the right server?");
  }
  const MethodId& method = server_.methods[header_.method];
  if (has_identity && !method.callers.Contains(role_)) {
    return PermissionDenied("role '", RoleName(role_), "' may not call ", method.name,
                            "; it needs ", method.callers.ToString());
  }
  return Status::Ok();
}

Connection::Progress Connection::ReceiveBody() {
  while (num_received_ < header_.body_bytes) {
    if (num_received_ == num_granted_ && !TakeStep()) return Progress::kAwaitsBudget;
    const Progress progress = Receive(body_.data(), num_granted_);
    if (progress != Progress::kFrame) return progress;
  }
  return Progress::kFrame;
}

// False: the budget is used up. OnGranted() continues, or has already done so.
bool Connection::TakeStep() {
  const uint64_t rest = header_.body_bytes - num_granted_;
  const uint64_t step = std::min(rest, num_granted_ == 0 ? kFirstStepBytes : kStepBytes);
  if (num_granted_ > 0) {
    // Waiting for the budget is not the client's fault: only a step that has begun is timed.
    const Lock lock(mutex_);
    if (!draining_) close_at_ = Clock::time_point::max();  // a drain has set its own limit
  }
  num_granted_ += step;
  const auto granted = [self = shared_from_this()](ByteLease lease) {
    self->OnGranted(std::move(lease));
  };
  if (!server_.budget.Acquire(step, &body_lease_, granted)) return false;
  GrowBody();
  return true;
}

// Memory is not taken for more than the first step before that has arrived.
void Connection::GrowBody() {
  const uint64_t wanted = num_granted_ <= kFirstStepBytes ? num_granted_ : header_.body_bytes;
  if (body_.size() == wanted) return;
  Buffer grown(wanted);
  if (num_received_ > 0) std::memcpy(grown.data(), body_.data(), num_received_);
  body_ = std::move(grown);
}

// On the thread that released. The socket's next event, which comes at once when bytes of the body
// are there already, continues reading.
void Connection::OnGranted(ByteLease lease) {  // if given back, then after the lock
  Lock lock(mutex_);
  reading_ = false;
  if (!closed_ && !draining_) {
    body_lease_ = std::move(lease);
    GrowBody();
    timed_step_ = num_granted_;
    CloseAt(Clock::now() + server_.options.body_patience);
  }
  if (draining_) MaybeFinishDrain();
  UpdateInterest();
}

// kFrame when all `size_bytes` are there.
Connection::Progress Connection::Receive(std::byte* to, uint64_t size_bytes) {
  while (num_received_ < size_bytes) {
    const ssize_t received = ReadSome(to + num_received_, size_bytes - num_received_);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return Progress::kBlocked;
    if (received <= 0) return Progress::kBroken;
    num_received_ += static_cast<uint64_t>(received);
  }
  return Progress::kFrame;
}

ssize_t Connection::ReadSome(std::byte* to, uint64_t size_bytes) {
  if (tls_ != nullptr) return tls_->Read(to, size_bytes);
  return ::recv(socket_.get(), to, size_bytes, MSG_DONTWAIT);
}

Connection::Progress Connection::SkipBody() {
  scratch_.resize(kScratchBytes);
  while (num_received_ < header_.body_bytes) {
    const uint64_t size = std::min<uint64_t>(header_.body_bytes - num_received_, kScratchBytes);
    const uint64_t skipped = std::exchange(num_received_, 0);
    const Progress progress = Receive(scratch_.data(), size);
    num_received_ += skipped;
    if (progress != Progress::kFrame) return progress;
  }
  return Progress::kFrame;
}

Connection::Progress Connection::DiscardAll() {
  scratch_.resize(kScratchBytes);
  // A stranger who sends without a pause must not keep this thread.
  for (int i = 0; i < kMaxDiscards; ++i) {
    num_received_ = 0;
    const Progress progress = Receive(scratch_.data(), kScratchBytes);
    if (progress != Progress::kFrame) return progress;
  }
  return Progress::kBlocked;
}

// Arms the socket for the next request first, and then lets the server run this one.
void Connection::FinishFrame(Lock lock) {
  if (handshake_.has_value()) return FinishHandshake(lock);
  const Phase phase = std::exchange(phase_, Phase::kHeader);
  num_received_ = 0;
  close_at_ = Clock::time_point::max();
  timed_step_ = 0;
  ++num_unanswered_;
  const FrameHeader header = header_;
  if (phase == Phase::kRefusedBody) {
    reading_ = false;
    const Status refusal = Refusal();
    if (refusal.code() == StatusCode::kPermissionDenied) {
      const std::string_view name = server_.methods[header.method].name;
      ReportRefusal(peer_, role_, name.empty() ? "connect" : name, refusal.message());
      server_.on_refused();
    }
    Enqueue(lock, header, refusal);
    return UpdateInterest();
  }
  held_bytes_ += header.body_bytes;
  Request request{shared_from_this(), header, Deadline(), std::move(body_), std::move(body_lease_)};
  reading_ = false;
  UpdateInterest();
  lock.unlock();
  server_.run(std::move(request));  // Server::Run() (server.cc): the handler, on this thread
}

// A message of the handshake is there, or a frame that is none. Time to authenticate is one limit
// for both messages: close_at_ stays as it is.
void Connection::FinishHandshake(Lock& lock) {
  const bool awaited = std::exchange(phase_, Phase::kHeader) == Phase::kHandshake;
  num_received_ = 0;
  if (!awaited) {
    return Refuse(lock,
                  PermissionDenied("the caller has sent no credentials; ", CredentialsRemedy()));
  }
  const std::span<const std::byte> message(handshake_bytes_.data(), header_.body_bytes);
  if (!handshake_->greeted()) {
    const auto challenge =
        handshake_->OnHello(*server_.options.security.identity, message,
                            tls_ != nullptr ? tls_->Binding() : ChannelBinding{});
    if (!challenge.ok()) return Refuse(lock, challenge.status());
    reading_ = false;
    ++num_unanswered_;
    Enqueue(lock, header_, EncodeMessage(challenge.value()));
    return UpdateInterest();
  }
  if (const Status status = handshake_->OnProof(message); !status.ok()) return Refuse(lock, status);
  role_ = handshake_->role();
  handshake_.reset();
  reading_ = false;
  close_at_ = Clock::time_point::max();
  server_.on_proven(tag_);
  UpdateInterest();
}

// Answers, and closes once the answer has been sent. The reply names the method of the handshake,
// so that the client knows that no call of this connection will be answered.
void Connection::Refuse(Lock& lock, const Status& why) {
  ReportRefusal(peer_, role_, "connect", why.message());
  server_.on_refused();
  FrameHeader header = header_;
  header.method = kAuthenticate.number;
  reading_ = false;
  draining_ = true;
  ++num_unanswered_;
  Enqueue(lock, header, why);
  UpdateInterest();
}

// The client has closed, or sent what is no frame. One that connects and closes is not reported:
// probes of a port do that.
void Connection::ReportUnprovenEnd() {
  std::string reason;
  if (tls_ != nullptr && !tls_->HasRead()) {
    reason = tls_->Error();
    if (tls_->PeerIsPlain()) RefuseInPlain();
  } else if (handshake_.has_value() && handshake_->greeted()) {
    reason = "it ended the handshake as role '" + std::string(RoleName(handshake_->role())) +
             "', as one does whose key is of another job";
  } else if (handshake_.has_value() && num_received_ > 0) {
    reason = "it does not speak this protocol";
  }
  if (reason.empty()) return;
  ReportRefusal(peer_, role_, "connect", reason);
  server_.on_refused();  // what is counted is in the audit: a reader of both finds it there
}

// To a client that has no TLS and could not read an answer that has.
void Connection::RefuseInPlain() {
  FrameHeader header;
  header.kind = FrameKind::kReply;
  header.status = static_cast<uint8_t>(StatusCode::kPermissionDenied);
  const std::string text = "the server uses TLS, and its caller does not; " + TlsRemedy();
  Segments body;
  body.AddView(std::as_bytes(std::span(text)));
  FrameWriter(header, body).Write(socket_.get());
  // Bytes that are left unread would reset the connection, and take the answer away.
  scratch_.resize(kScratchBytes);
  [[maybe_unused]] const ssize_t ignored =
      ::recv(socket_.get(), scratch_.data(), kScratchBytes, MSG_DONTWAIT);
}

Clock::time_point Connection::Deadline() const {
  return received_at_ + std::chrono::milliseconds(header_.deadline_ms);
}

// ---- writing

void Connection::Reply(const FrameHeader& request, StatusOr<Segments> reply) {
  if (reply.ok() && reply->size_bytes() > server_.options.max_body_bytes) {
    // Not kResourceExhausted: trying again would not help.
    reply = InvalidArgument("a reply of ", reply->size_bytes(), " bytes is above the limit of ",
                            server_.options.max_body_bytes, "; ask for less at once");
  }
  Lock lock(mutex_);
  held_bytes_ -= request.body_bytes;
  Enqueue(lock, request, std::move(reply));
  UpdateInterest();
}

void Connection::Enqueue(Lock& lock, FrameHeader request, StatusOr<Segments> reply) {
  if (closed_) return;
  FrameHeader header = request;
  header.version = kVersion;
  header.kind = FrameKind::kReply;
  header.status = static_cast<uint8_t>(reply.status().code());
  header.deadline_ms = 0;
  header.batch = 0;
  Segments body;
  if (reply.ok()) {
    body = std::move(reply).value();
  } else {
    const std::string message = reply.status().message();
    const auto bytes = std::as_bytes(std::span(message));
    body.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
  outgoing_.emplace_back(header, std::move(body));
  held_bytes_ += outgoing_.back().frame.body_bytes();
  if (!writing_ && !write_blocked_) Flush(lock);
}

// Writes until nothing is left or the socket is full. Replies that come meanwhile join the queue.
void Connection::Flush(Lock& lock) {
  writing_ = true;
  auto result = FrameWriter::Result::kDone;
  while (!closed_ && !outgoing_.empty() && result == FrameWriter::Result::kDone) {
    FrameWriter& frame = outgoing_.front().frame;  // stays where it is while the queue grows
    lock.unlock();
    result = frame.Write(socket_.get(), tls_.get());
    lock.lock();
    if (result != FrameWriter::Result::kDone) break;
    held_bytes_ -= frame.body_bytes();
    outgoing_.pop_front();
    --num_unanswered_;
  }
  writing_ = false;
  write_blocked_ = result == FrameWriter::Result::kBlocked;
  if (result == FrameWriter::Result::kBroken) Close();
  MaybeFinishDrain();
}

// ---- ending

void Connection::Drain() {
  Lock lock(mutex_);
  draining_ = true;  // who is reading sees it when they are done, and drops what they have read
  MaybeFinishDrain();
  UpdateInterest();
}

// Closing a socket with unread bytes in it resets the connection and takes away replies that are
// still on their way. So our side is shut down first, and what the client sends is read and dropped
// until it closes too. It repeats the dropped requests elsewhere: they were never begun.
void Connection::MaybeFinishDrain() {
  if (!draining_ || closed_ || finished_ || num_unanswered_ > 0) return;
  finished_ = true;
  ::shutdown(socket_.get(), SHUT_WR);
  CloseAt(Clock::now() + kLinger);
}

void Connection::CloseAt(Clock::time_point time) {
  close_at_ = time;
  server_.poller.WakeAt(time);
}

Clock::time_point Connection::CloseIfDue(Clock::time_point now) {
  Lock lock(mutex_);
  if (now >= close_at_ && !draining_ && !reading_ && timed_step_ != 0 && !MayRead()) {
    // The server reads nothing before its own replies are gone: the client is not to blame.
    CloseAt(now + server_.options.body_patience);
  }
  if (now >= close_at_) Close();
  return closed_ ? Clock::time_point::max() : close_at_;
}

void Connection::CloseNow() {
  Lock lock(mutex_);
  Close();
}

// The client sees the end now. Descriptor, buffers and lease go with the connection itself: another
// thread may be using them.
void Connection::Close() {
  if (closed_) return;
  closed_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);
  server_.on_closed(tag_);
}

}  // namespace persia::net

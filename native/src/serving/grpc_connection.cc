// The session, its bytes and its times.
#include "serving/grpc_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>
#include <utility>

#include "serving/grpc_stream.h"

namespace persia::serving {
namespace {

constexpr size_t kReadBytes = 64 << 10;     // that stay in a cache of the processor
constexpr int kMaxReads = 32;               // before other connections have their turn
constexpr size_t kMaxOutBytes = 256 << 10;  // framed before they are sent
// What a client may send before we have looked at it. Were it more, requests would wait in buffers
// of the system, where their deadlines are not seen.
constexpr int32_t kConnectionWindow = 1 << 20;
// Calls of one client under way; it waits itself where it has more.
constexpr uint32_t kMinStreams = 100;

nghttp2_option* Options() {
  static nghttp2_option* const options = [] {
    nghttp2_option* made = nullptr;
    nghttp2_option_new(&made);
    // Clients of gRPC send `authorization: Bearer ` with an empty token, and read a reset as
    // INTERNAL.
    // Before 1.50 the library takes it anyway.
#if NGHTTP2_VERSION_NUM >= 0x013200
    nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(made, 1);
#endif
    // A call that is refused gets no more bytes.
    nghttp2_option_set_no_auto_window_update(made, 1);
    // Nothing is asked of them, and a client could leave as many as it may open.
    nghttp2_option_set_no_closed_streams(made, 1);
#ifdef PERSIA_NGHTTP2_LIMITS_RESETS
    // Clients of an overloaded server cancel each call whose deadline passes, so the library's own
    // limit of 33 a second would close their connections. A call costs nothing before it is read.
    // Libraries without the setting have no limit: then only what calls cost bounds resets. The
    // limit of CONTINUATION frames (8) stays as libraries have it; ours of header fields holds in
    // each.
    nghttp2_option_set_stream_reset_rate_limit(made, 1u << 20, 1u << 17);
#endif
    return made;
  }();
  return options;
}

std::unique_ptr<net::TlsStream> MakeTls(const GrpcOptions& options, int fd) {
  if (options.tls == nullptr) return nullptr;
  return std::make_unique<net::TlsStream>(options.tls->Context(), fd,
                                          net::TlsStream::Side::kServer);
}

}  // namespace

GrpcConnection::GrpcConnection(net::UniqueFd socket, uint64_t tag, std::string peer,
                               GrpcShared* shared)
    : socket_(std::move(socket)),
      tag_(tag),
      peer_(std::move(peer)),
      shared_(*shared),
      tls_(MakeTls(shared->options, socket_.get())),
      read_at_(Clock::now()),
      progress_at_(read_at_),
      stream_window_(kStreamWindow) {
  // It fails for want of memory alone.
  if (nghttp2_session_server_new2(&session_, Callbacks(), this, Options()) != 0) {
    throw std::bad_alloc();
  }
  const std::array<nghttp2_settings_entry, 3> settings = {{
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS,
       std::max(kMinStreams, 2 * shared->options.max_calls)},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kStreamWindow},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, kMaxHeaderBytes},
  }};
  Check(nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings.data(), settings.size()));
  Check(nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow));
}

GrpcConnection::~GrpcConnection() {
  for (const auto& [id, stream] : streams_) CloseCall(stream.get());
  nghttp2_session_del(session_);
}

nghttp2_session_callbacks* GrpcConnection::Callbacks() {
  static nghttp2_session_callbacks* const callbacks = [] {
    nghttp2_session_callbacks* made = nullptr;
    nghttp2_session_callbacks_new(&made);
    nghttp2_session_callbacks_set_on_begin_headers_callback(made, &OnBeginHeaders);
    nghttp2_session_callbacks_set_on_header_callback(made, &OnHeader);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(made, &OnData);
    nghttp2_session_callbacks_set_on_frame_recv_callback(made, &OnFrame);
    nghttp2_session_callbacks_set_on_frame_send_callback(made, &OnFrameSent);
    nghttp2_session_callbacks_set_on_stream_close_callback(made, &OnStreamClosed);
    return made;
  }();
  return callbacks;
}

GrpcConnection::Stream* GrpcConnection::Find(int32_t id) {
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second.get();
}

// ---- bytes

ssize_t GrpcConnection::Receive(std::byte* to, size_t size) {
  if (tls_ != nullptr) return tls_->Read(to, size);
  return ::recv(socket_.get(), to, size, MSG_DONTWAIT);
}

bool GrpcConnection::Read() {
  thread_local std::vector<std::byte> scratch(kReadBytes);
  for (int i = 0; i < kMaxReads; ++i) {
    const ssize_t received = Receive(scratch.data(), scratch.size());
    if (received == 0) return false;
    if (received < 0) {
      const int error = errno;
      // What TLS has to say about its failure is sent all the same.
      if (tls_ != nullptr) tls_->Flush();
      return error == EAGAIN || error == EINTR;
    }
    read_at_ = Clock::now();
    const auto* bytes = reinterpret_cast<const uint8_t*>(scratch.data());
    if (nghttp2_session_mem_recv(session_, bytes, static_cast<size_t>(received)) < 0) {
      Flush();  // a GOAWAY that says why
      return false;
    }
    if (static_cast<size_t>(received) < scratch.size() && tls_ == nullptr) break;
  }
  return true;
}

bool GrpcConnection::Flush() {
  // A client begins; before its handshake is done nothing can be written.
  if (tls_ != nullptr && !tls_->HasRead()) return true;
  while (!is_broken_) {
    while (out_.size() < kMaxOutBytes) {
      const uint8_t* framed = nullptr;
      const ssize_t size = nghttp2_session_mem_send(session_, &framed);
      if (size < 0) return false;
      if (size == 0) break;
      out_.append(View(framed, static_cast<size_t>(size)));
    }
    if (out_.empty()) break;
    if (!Write()) return false;
    if (is_blocked_) return true;
  }
  return !is_broken_ &&
         (nghttp2_session_want_read(session_) != 0 || nghttp2_session_want_write(session_) != 0);
}

// What was framed. False: the socket is broken.
bool GrpcConnection::Write() {
  // One that was not blocked has taken what there was.
  bool has_progress = !std::exchange(is_blocked_, false);
  const auto failed = [&] {
    if (has_progress) progress_at_ = Clock::now();
    is_blocked_ = errno == EAGAIN || errno == EINTR;
    return is_blocked_;
  };
  while (written_ < out_.size()) {
    const auto rest = std::as_bytes(std::span(out_)).subspan(written_);
    const ssize_t sent = tls_ != nullptr
                             ? tls_->Write(rest.data(), rest.size())
                             : ::send(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent <= 0) return failed();
    has_progress = true;
    written_ += static_cast<size_t>(sent);
  }
  if (tls_ != nullptr && tls_->Flush() <= 0) return failed();
  out_.clear();
  written_ = 0;
  return true;
}

// ---- time

bool GrpcConnection::CheckTimes(Clock::time_point now) {
  const auto latest = now - shared_.options.patience;
  if (is_blocked_ && progress_at_ < latest) return false;
  // After a pause of this process what the client has done in time may not have been looked at.
  if (!is_blocked_ && IsLate(latest) && !(Read() && Flush())) return false;
  if (!has_begun_ && progress_at_ < latest) {
    Drain();
    Flush();
    return false;
  }
  if (!shared_.is_overloaded) UseWindow(kStreamWindow);
  EndLateStreams(latest);
  std::vector<Stream*> due;
  for (const auto& [id, stream] : streams_) {
    if (!stream->is_finished && stream->due <= now) due.push_back(stream.get());
  }
  for (const Stream* stream : due) {
    shared_.handler.OnLate(stream->call);
    Finish(stream->id, GrpcCode::kDeadlineExceeded, "the request's deadline passed");
  }
  return true;
}

bool GrpcConnection::IsLate(Clock::time_point latest) const {
  if (!has_begun_ && progress_at_ < latest) return true;
  return std::any_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
    const Stream& stream = *entry.second;
    return !stream.is_reset && ((stream.must_send() && stream.sent_at < latest) ||
                                (stream.must_take() && stream.taken_at < latest));
  });
}

void GrpcConnection::EndLateStreams(Clock::time_point latest) {
  for (const auto& [id, entry] : streams_) {
    Stream* stream = entry.get();
    if (stream->is_reset) continue;
    // Of a blocked connection nothing is read.
    const bool is_silent = !is_blocked_ && stream->must_send() && stream->sent_at < latest;
    if ((stream->must_take() && stream->taken_at < latest) || (is_silent && stream->call == 0)) {
      Reset(stream, NGHTTP2_CANCEL);
    } else if (is_silent) {
      Refuse(stream, GrpcCode::kDeadlineExceeded,
             "no byte of the message has come for " +
                 std::to_string(shared_.options.patience.count()) + " ms: send it without pauses");
    }
  }
}

// What the library could not do for want of memory it has forgotten.
void GrpcConnection::Check(int result) {
  if (nghttp2_is_fatal(result) != 0) is_broken_ = true;
}

void GrpcConnection::Drain() {
  Check(nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                              nghttp2_session_get_last_proc_stream_id(session_), NGHTTP2_NO_ERROR,
                              nullptr, 0));
}

}  // namespace persia::serving

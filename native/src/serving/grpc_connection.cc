#include "serving/grpc_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "serving/grpc_text.h"

namespace persia::serving {
namespace {

using net::Clock;

constexpr size_t kReadBytes = 64 << 10;     // that stay in a cache of the processor
constexpr int kMaxReads = 32;               // before other connections have their turn
constexpr size_t kMaxOutBytes = 256 << 10;  // framed before they are sent
constexpr size_t kPrefixBytes = 5;          // of a message: whether it is compressed, its length
constexpr size_t kFirstBytes = 64 << 10;    // that are reserved for a message before they arrive
constexpr size_t kMaxHeaderBytes = 16 << 10;
// What a client may send before we have looked at it. Were it more, requests would wait in buffers
// of the system, where their deadlines are not seen.
constexpr uint32_t kStreamWindow = 1 << 20;
constexpr int32_t kConnectionWindow = 1 << 20;
constexpr std::chrono::seconds kPatience{10};  // with a client that does not read or send

std::string_view View(const uint8_t* bytes, size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

// `name` and `value` must outlive the submission.
nghttp2_nv Header(std::string_view name, std::string_view value, uint8_t flags = 0) {
  const auto* name_bytes = reinterpret_cast<const uint8_t*>(name.data());
  const auto* value_bytes = reinterpret_cast<const uint8_t*>(value.data());
  return {const_cast<uint8_t*>(name_bytes), const_cast<uint8_t*>(value_bytes), name.size(),
          value.size(), flags};
}

nghttp2_option* Options() {
  static nghttp2_option* const options = [] {
    nghttp2_option* made = nullptr;
    nghttp2_option_new(&made);
    // Clients of gRPC send `authorization: Bearer ` with an empty token, and read a reset as
    // INTERNAL.
    nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(made, 1);
#ifdef PERSIA_NGHTTP2_LIMITS_RESETS
    // Clients of an overloaded server cancel each call whose deadline passes, so the library's own
    // limit of 33 a second would close their connections. A call costs nothing before it is read.
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

struct GrpcConnection::Stream {
  int32_t id = 0;
  CallId call = 0;  // 0: the handler does not know it
  CallHead head;
  bool is_post = false;
  bool is_grpc = false;
  size_t header_bytes = 0;
  uint32_t num_authorizations = 0;
  bool has_begun = false;  // its header fields are complete

  std::array<std::byte, kPrefixBytes> prefix{};
  size_t prefix_bytes = 0;
  uint64_t message_bytes = 0;  // of the message that arrives
  std::vector<std::byte> message;
  uint64_t held_bytes = 0;
  bool has_ended = false;  // the client sends no more

  std::string outgoing;  // framed messages, the first read_bytes of them taken
  size_t read_bytes = 0;
  bool has_responded = false;
  bool is_deferred = false;
  bool is_finished = false;
  GrpcCode code = GrpcCode::kOk;
  std::string text;
  Clock::time_point due = Clock::time_point::max();
};

GrpcConnection::GrpcConnection(net::UniqueFd socket, std::string peer, GrpcShared* shared)
    : socket_(std::move(socket)),
      peer_(std::move(peer)),
      shared_(*shared),
      tls_(MakeTls(shared->options, socket_.get())),
      must_begin_by_(Clock::now() + kPatience) {
  nghttp2_session_server_new2(&session_, Callbacks(), this, Options());
  const std::array<nghttp2_settings_entry, 3> settings = {{
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, 1u << 16},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kStreamWindow},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, kMaxHeaderBytes},
  }};
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings.data(), settings.size());
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
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
      // What TLS has to say about its failure is sent all the same.
      if (tls_ != nullptr) tls_->Flush();
      return errno == EAGAIN || errno == EINTR;
    }
    read_at_ = Clock::now();
    has_begun_ = true;
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
  while (true) {
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
  return nghttp2_session_want_read(session_) != 0 || nghttp2_session_want_write(session_) != 0;
}

// What was framed. False: the socket is broken.
bool GrpcConnection::Write() {
  is_blocked_ = false;
  const auto failed = [&] {
    is_blocked_ = errno == EAGAIN || errno == EINTR;
    return is_blocked_;
  };
  while (written_ < out_.size()) {
    const auto rest = std::as_bytes(std::span(out_)).subspan(written_);
    const ssize_t sent = tls_ != nullptr
                             ? tls_->Write(rest.data(), rest.size())
                             : ::send(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent <= 0) return failed();
    written_ += static_cast<size_t>(sent);
  }
  if (tls_ != nullptr && tls_->Flush() <= 0) return failed();
  out_.clear();
  written_ = 0;
  return true;
}

// ---- the client's half of a call

int GrpcConnection::OnBeginHeaders(nghttp2_session*, const nghttp2_frame* frame, void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
  auto stream = std::make_unique<Stream>();
  stream->id = frame->hd.stream_id;
  stream->head.peer = connection.peer_;
  stream->head.arrived = connection.read_at_;
  stream->due = connection.read_at_ + kPatience;
  connection.streams_[stream->id] = std::move(stream);
  return 0;
}

int GrpcConnection::OnHeader(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                             size_t name_size, const uint8_t* value, size_t value_size, uint8_t,
                             void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  Stream* stream = connection.Find(frame->hd.stream_id);
  if (stream == nullptr || stream->has_begun) return 0;  // of trailers nothing is used
  const bool fits = connection.TakeHeader(stream, View(name, name_size), View(value, value_size));
  return fits ? 0 : NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
}

bool GrpcConnection::TakeHeader(Stream* stream, std::string_view name, std::string_view value) {
  constexpr size_t kFieldBytes = 32;  // that RFC 9113 adds for each field
  stream->header_bytes += name.size() + value.size() + kFieldBytes;
  if (stream->header_bytes > kMaxHeaderBytes) return false;
  CallHead& head = stream->head;
  if (name == ":path") {
    head.method = value;
  } else if (name == ":method") {
    stream->is_post = value == "POST";
  } else if (name == "content-type") {
    stream->is_grpc = value.starts_with("application/grpc");
  } else if (name == "grpc-timeout") {
    if (const auto timeout = ReadTimeout(value)) head.deadline = head.arrived + *timeout;
  } else if (name == "grpc-encoding") {
    head.encoding = value;
  } else if (name == "authorization") {
    // Of two it could not be said which one counts.
    head.authorization.reset();
    if (stream->num_authorizations++ == 0) head.authorization = value;
  }
  return true;
}

int GrpcConnection::OnFrame(nghttp2_session*, const nghttp2_frame* frame, void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
  Stream* stream = connection.Find(frame->hd.stream_id);
  if (stream == nullptr) return 0;
  if (!stream->has_begun) connection.BeginCall(stream);
  if ((frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0) connection.EndOfRequest(stream);
  return 0;
}

void GrpcConnection::BeginCall(Stream* stream) {
  stream->has_begun = true;
  if (!stream->is_post || !stream->is_grpc) return RefuseHttp(stream, "415");
  if (shared_.calls.size() >= shared_.options.max_calls) {
    return Finish(stream->id, GrpcCode::kResourceExhausted,
                  "as many requests as this server holds are under way (--max-queued): try again "
                  "later, or ask another server");
  }
  stream->call = shared_.next_call++;
  shared_.calls[stream->call] = {this, stream->id};
  const auto due = shared_.handler.OnCall(stream->call, stream->head);
  if (!due.has_value()) {
    shared_.calls.erase(stream->call);
  } else if (!stream->is_finished) {
    stream->due = *due;
  }
}

int GrpcConnection::OnData(nghttp2_session*, uint8_t, int32_t id, const uint8_t* data, size_t size,
                           void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  if (Stream* stream = connection.Find(id); stream != nullptr) {
    connection.TakeData(stream, {reinterpret_cast<const std::byte*>(data), size});
  }
  return 0;
}

void GrpcConnection::TakeData(Stream* stream, std::span<const std::byte> data) {
  while (!data.empty() && !stream->is_finished) {
    if (stream->prefix_bytes < kPrefixBytes) {
      const size_t size = std::min(kPrefixBytes - stream->prefix_bytes, data.size());
      std::memcpy(stream->prefix.data() + stream->prefix_bytes, data.data(), size);
      stream->prefix_bytes += size;
      data = data.subspan(size);
      if (stream->prefix_bytes < kPrefixBytes || !BeginMessage(stream)) continue;
    }
    const size_t size =
        std::min<size_t>(stream->message_bytes - stream->message.size(), data.size());
    stream->message.insert(stream->message.end(), data.begin(), data.begin() + size);
    data = data.subspan(size);
    if (stream->message.size() == stream->message_bytes) TakeMessage(stream);
  }
}

// False: it was refused.
bool GrpcConnection::BeginMessage(Stream* stream) {
  stream->message_bytes = 0;
  for (size_t i = 1; i < kPrefixBytes; ++i) {
    stream->message_bytes =
        stream->message_bytes << 8 | std::to_integer<uint64_t>(stream->prefix[i]);
  }
  const GrpcOptions& options = shared_.options;
  if (stream->message_bytes > options.max_message_bytes) {
    Finish(stream->id, GrpcCode::kResourceExhausted,
           "the request has " + std::to_string(stream->message_bytes) +
               " bytes, this server takes " + std::to_string(options.max_message_bytes) +
               ": send several requests, or raise --max-request-mib");
    return false;
  }
  // Counted before they arrive: a client that announces a large message has to send it.
  stream->held_bytes += stream->message_bytes;
  shared_.held_bytes += stream->message_bytes;
  if (shared_.held_bytes > options.max_held_bytes) {
    Finish(stream->id, GrpcCode::kResourceExhausted,
           "the requests under way have " + std::to_string(shared_.held_bytes) +
               " bytes, this server holds " + std::to_string(options.max_held_bytes) +
               ": try again later, or ask another server");
    return false;
  }
  stream->message.reserve(std::min<size_t>(stream->message_bytes, kFirstBytes));
  return true;
}

void GrpcConnection::TakeMessage(Stream* stream) {
  const bool is_compressed = stream->prefix[0] != std::byte{0};
  stream->prefix_bytes = 0;
  shared_.handler.OnMessage(stream->call, std::exchange(stream->message, {}), is_compressed);
}

void GrpcConnection::EndOfRequest(Stream* stream) {
  stream->has_ended = true;
  if (stream->is_finished || stream->call == 0) return;
  // An empty message is complete with its prefix.
  if (stream->prefix_bytes == kPrefixBytes && stream->message_bytes == 0) TakeMessage(stream);
  if (stream->prefix_bytes != 0) {
    return Finish(stream->id, GrpcCode::kInvalidArgument, "the request ends within a message");
  }
  shared_.handler.OnEnd(stream->call);
}

int GrpcConnection::OnStreamClosed(nghttp2_session*, int32_t id, uint32_t, void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  const auto found = connection.streams_.find(id);
  if (found == connection.streams_.end()) return 0;
  connection.CloseCall(found->second.get());
  connection.streams_.erase(found);
  return 0;
}

void GrpcConnection::CloseCall(Stream* stream) {
  shared_.held_bytes -= stream->held_bytes;
  if (shared_.calls.erase(stream->call) != 0) shared_.handler.OnClosed(stream->call);
}

// ---- the server's half

void GrpcConnection::Send(int32_t id, std::string message) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->is_finished) return;
  const auto size = static_cast<uint32_t>(message.size());
  std::string& framed = stream->outgoing;
  framed.reserve(framed.size() + kPrefixBytes + message.size());
  framed.push_back('\0');
  for (int shift = 24; shift >= 0; shift -= 8) framed.push_back(static_cast<char>(size >> shift));
  framed.append(message);
  Respond(stream);
}

void GrpcConnection::Finish(int32_t id, GrpcCode code, std::string text) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->is_finished) return;
  stream->is_finished = true;
  if (code == GrpcCode::kResourceExhausted) ++shared_.num_refused;
  stream->code = code;
  stream->text = PercentEncoded(text);
  stream->message = {};
  stream->due = Clock::now() + kPatience;
  Respond(stream);
}

// Begins the response, or continues it after there was nothing to send.
void GrpcConnection::Respond(Stream* stream) {
  if (stream->is_deferred) {
    stream->is_deferred = false;
    nghttp2_session_resume_data(session_, stream->id);
  }
  if (std::exchange(stream->has_responded, true)) return;
  const std::string code = std::to_string(static_cast<uint32_t>(stream->code));
  const std::array<nghttp2_nv, 4> headers = {
      Header(":status", "200"), Header("content-type", "application/grpc"),
      Header("grpc-status", code), Header("grpc-message", stream->text, NGHTTP2_NV_FLAG_NO_INDEX)};
  if (stream->is_finished && stream->outgoing.empty()) {
    nghttp2_submit_response(session_, stream->id, headers.data(), stream->text.empty() ? 3 : 4,
                            nullptr);
    return;
  }
  const nghttp2_data_provider provider = {.source = {.ptr = stream},
                                          .read_callback = &ReadOutgoing};
  nghttp2_submit_response(session_, stream->id, headers.data(), 2, &provider);
}

// A client of another protocol; gRPC's own would read a status of HTTP as one of gRPC.
void GrpcConnection::RefuseHttp(Stream* stream, std::string_view status) {
  stream->is_finished = stream->has_responded = true;
  const std::array<nghttp2_nv, 1> headers = {Header(":status", status)};
  nghttp2_submit_response(session_, stream->id, headers.data(), headers.size(), nullptr);
}

ssize_t GrpcConnection::ReadOutgoing(nghttp2_session*, int32_t, uint8_t* to, size_t size,
                                     uint32_t* flags, nghttp2_data_source* source, void* self) {
  auto& stream = *static_cast<Stream*>(source->ptr);
  const size_t num_read = std::min(size, stream.outgoing.size() - stream.read_bytes);
  std::memcpy(to, stream.outgoing.data() + stream.read_bytes, num_read);
  stream.read_bytes += num_read;
  if (stream.read_bytes == stream.outgoing.size()) {
    stream.outgoing.clear();
    stream.read_bytes = 0;
  }
  if (stream.outgoing.empty() && stream.is_finished) {
    *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    static_cast<GrpcConnection*>(self)->SubmitTrailers(&stream);
  } else if (num_read == 0) {
    stream.is_deferred = true;
    return NGHTTP2_ERR_DEFERRED;
  }
  return static_cast<ssize_t>(num_read);
}

void GrpcConnection::SubmitTrailers(Stream* stream) {
  const std::string code = std::to_string(static_cast<uint32_t>(stream->code));
  const std::array<nghttp2_nv, 2> trailers = {
      Header("grpc-status", code), Header("grpc-message", stream->text, NGHTTP2_NV_FLAG_NO_INDEX)};
  nghttp2_submit_trailer(session_, stream->id, trailers.data(), stream->text.empty() ? 1 : 2);
}

// The client need not send the rest of a request that has its answer.
int GrpcConnection::OnFrameSent(nghttp2_session* session, const nghttp2_frame* frame, void* self) {
  const bool is_last = (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0 &&
                       (frame->hd.type == NGHTTP2_HEADERS || frame->hd.type == NGHTTP2_DATA);
  if (!is_last) return 0;
  const Stream* stream = static_cast<GrpcConnection*>(self)->Find(frame->hd.stream_id);
  if (stream != nullptr && !stream->has_ended) {
    nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id, NGHTTP2_NO_ERROR);
  }
  return 0;
}

// ---- time

bool GrpcConnection::CheckTimes(Clock::time_point now) {
  if (!has_begun_ && now > must_begin_by_) return false;
  std::vector<int32_t> late;
  for (const auto& [id, stream] : streams_) {
    if (stream->due <= now) late.push_back(id);
  }
  for (const int32_t id : late) {
    Stream* stream = Find(id);
    if (stream->is_finished || stream->call == 0) {
      nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
      stream->due = Clock::time_point::max();
      continue;
    }
    shared_.handler.OnLate(stream->call);
    Finish(id, GrpcCode::kDeadlineExceeded, "the request's deadline passed");
  }
  return true;
}

void GrpcConnection::Drain() {
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_), NGHTTP2_NO_ERROR,
                        nullptr, 0);
}

}  // namespace persia::serving

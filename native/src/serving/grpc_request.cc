// The client's half of a call.
#include <algorithm>
#include <cstring>
#include <utility>

#include "serving/grpc_stream.h"
#include "serving/grpc_text.h"

namespace persia::serving {
namespace {

constexpr size_t kFirstBytes = 64 << 10;  // that are reserved for a message before they arrive
// No method needs more, and each costs more than its bytes.
constexpr uint32_t kMaxMessages = 256;
constexpr size_t kMaxMethodBytes = 256;  // longer than any method; the rest is not kept
// While many calls are refused. Small requests still need no round trip.
constexpr uint32_t kNarrowWindow = 1 << 10;

}  // namespace

int GrpcConnection::OnBeginHeaders(nghttp2_session*, const nghttp2_frame* frame, void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
  auto stream = std::make_unique<Stream>();
  stream->id = frame->hd.stream_id;
  stream->head.peer = connection.peer_;
  stream->head.arrived = stream->sent_at = connection.read_at_;
  connection.streams_[stream->id] = std::move(stream);
  return 0;
}

int GrpcConnection::OnHeader(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                             size_t name_size, const uint8_t* value, size_t value_size, uint8_t,
                             void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  Stream* stream = connection.Find(frame->hd.stream_id);
  if (stream == nullptr || stream->has_begun) return 0;  // of trailers nothing is used
  connection.TakeHeader(stream, View(name, name_size), View(value, value_size));
  return 0;
}

void GrpcConnection::TakeHeader(Stream* stream, std::string_view name, std::string_view value) {
  constexpr size_t kFieldBytes = 32;  // that RFC 9113 adds for each field
  stream->header_bytes += name.size() + value.size() + kFieldBytes;
  if (stream->header_bytes > kMaxHeaderBytes) return;  // BeginCall refuses it
  CallHead& head = stream->head;
  if (name == ":path") {
    head.method = value.substr(0, kMaxMethodBytes);
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
}

int GrpcConnection::OnFrame(nghttp2_session*, const nghttp2_frame* frame, void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  if (frame->hd.type == NGHTTP2_SETTINGS && (frame->hd.flags & NGHTTP2_FLAG_ACK) != 0) {
    connection.OnSettingsAccepted();
  }
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
  Stream* stream = connection.Find(frame->hd.stream_id);
  if (stream == nullptr) return 0;
  connection.has_begun_ = true;
  if (!stream->has_begun) connection.BeginCall(stream);
  if ((frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0) connection.EndOfRequest(stream);
  return 0;
}

void GrpcConnection::BeginCall(Stream* stream) {
  stream->has_begun = true;
  if (stream->header_bytes > kMaxHeaderBytes) {
    return Finish(stream->id, GrpcCode::kResourceExhausted,
                  "the request's header fields have more than " + std::to_string(kMaxHeaderBytes) +
                      " bytes: send less metadata");
  }
  if (!stream->is_post || !stream->is_grpc) return RefuseHttp(stream, "415");
  if (shared_.calls.size() >= shared_.options.max_calls) {
    return TurnAway(stream, GrpcCode::kResourceExhausted,
                    "as many requests as this server holds are under way (--max-queued): try "
                    "again later, or ask another server");
  }
  const CallId call = shared_.next_call++;
  CallVerdict verdict = shared_.handler.OnCall(call, stream->head);
  if (verdict.code != GrpcCode::kOk) {
    return TurnAway(stream, verdict.code, std::move(verdict.text));
  }
  stream->call = call;
  stream->due = verdict.due;
  stream->held = std::make_shared<CallBytes>(shared_.held_bytes);
  shared_.calls[call] = {this, stream->id};
}

// A call that the handler does not know. Where there are many, the client is to learn of it before
// it sends the message.
void GrpcConnection::TurnAway(Stream* stream, GrpcCode code, std::string text) {
  ++shared_.num_turned_away;
  if (shared_.is_overloaded) UseWindow(kNarrowWindow);
  Finish(stream->id, code, std::move(text));
}

void GrpcConnection::UseWindow(uint32_t size) {
  if (stream_window_ == size || !is_window_accepted_) return;
  stream_window_ = size;
  is_window_accepted_ = false;
  const nghttp2_settings_entry setting = {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, size};
  Check(nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, &setting, 1));
}

// A new size counts from here on, also for calls that have begun.
void GrpcConnection::OnSettingsAccepted() {
  is_window_accepted_ = true;
  if (stream_window_ == kStreamWindow) return;
  for (const auto& [id, stream] : streams_) {
    if (!stream->is_finished && !stream->has_ended) Widen(stream.get());
  }
}

// Lets the client send the rest of a call that was admitted.
void GrpcConnection::Widen(Stream* stream) {
  Check(nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, stream->id,
                                              kStreamWindow));
}

int GrpcConnection::OnData(nghttp2_session*, uint8_t, int32_t id, const uint8_t* data, size_t size,
                           void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  Stream* stream = connection.Find(id);
  if (stream != nullptr) {
    connection.TakeData(stream, {reinterpret_cast<const std::byte*>(data), size});
  }
  if (stream == nullptr || stream->is_finished) {
    connection.Check(nghttp2_session_consume_connection(connection.session_, size));
    return 0;
  }
  connection.Check(nghttp2_session_consume(connection.session_, id, size));
  const bool is_within_message = stream->prefix_bytes != 0;
  if (is_within_message && connection.stream_window_ < kStreamWindow) connection.Widen(stream);
  return 0;
}

void GrpcConnection::TakeData(Stream* stream, std::span<const std::byte> data) {
  stream->sent_at = read_at_;
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
    if (!Hold(stream, size)) return;
    stream->message.insert(stream->message.end(), data.begin(), data.begin() + size);
    data = data.subspan(size);
    if (stream->message.size() == stream->message_bytes) TakeMessage(stream);
  }
}

// Bytes that have arrived, not those that are announced: else a client could take all that the
// server may hold without sending it. False: the call was refused.
bool GrpcConnection::Hold(Stream* stream, size_t size) {
  const uint64_t most = shared_.options.max_held_bytes;
  const uint64_t held = *shared_.held_bytes + size;
  if (held <= most) {
    stream->held->Add(size);
    return true;
  }
  Refuse(stream, GrpcCode::kResourceExhausted,
         "the requests under way have " + std::to_string(held) + " bytes, this server holds " +
             std::to_string(most) + ": try again later, or ask another server");
  return false;
}

// False: it was refused.
bool GrpcConnection::BeginMessage(Stream* stream) {
  stream->message_bytes = 0;
  for (size_t i = 1; i < kPrefixBytes; ++i) {
    stream->message_bytes =
        stream->message_bytes << 8 | std::to_integer<uint64_t>(stream->prefix[i]);
  }
  const GrpcOptions& options = shared_.options;
  const auto refuse = [&](const std::string& text) {
    Refuse(stream, GrpcCode::kResourceExhausted, text);
    return false;
  };
  if (stream->message_bytes > options.max_message_bytes) {
    return refuse("the request has " + std::to_string(stream->message_bytes) +
                  " bytes, this server takes " + std::to_string(options.max_message_bytes) +
                  ": send several requests, or raise --max-request-mib");
  }
  if (++stream->num_messages > kMaxMessages) {
    return refuse("the call has more than " + std::to_string(kMaxMessages) +
                  " messages: begin another call");
  }
  stream->message.reserve(std::min<size_t>(stream->message_bytes, kFirstBytes));
  return true;
}

void GrpcConnection::TakeMessage(Stream* stream) {
  const bool is_compressed = stream->prefix[0] != std::byte{0};
  const std::string& encoding = stream->head.encoding;
  if (is_compressed && encoding != "gzip" && encoding != "deflate") {
    return Refuse(stream, GrpcCode::kUnimplemented,
                  "the message is compressed by '" + encoding.substr(0, 40) +
                      "': send gzip, deflate or identity");
  }
  stream->prefix_bytes = 0;
  // From here on the bytes are counted with `held`, by whatever keeps it.
  shared_.handler.OnMessage(stream->call,
                            {std::exchange(stream->message, {}), is_compressed, stream->held});
}

void GrpcConnection::EndOfRequest(Stream* stream) {
  stream->has_ended = true;
  if (stream->is_finished || stream->call == 0) return;
  if (stream->prefix_bytes != 0) {
    return Refuse(stream, GrpcCode::kInvalidArgument, "the request ends within a message");
  }
  shared_.handler.OnEnd(stream->call);
}

// A call that the handler knows.
void GrpcConnection::Refuse(Stream* stream, GrpcCode code, std::string text) {
  shared_.handler.OnRefused(stream->call, code);
  Finish(stream->id, code, std::move(text));
}

int GrpcConnection::OnStreamClosed(nghttp2_session*, int32_t id, uint32_t, void* self) {
  auto& connection = *static_cast<GrpcConnection*>(self);
  const auto found = connection.streams_.find(id);
  if (found == connection.streams_.end()) return 0;
  connection.CloseCall(found->second.get());
  connection.streams_.erase(found);
  return 0;
}

// A message that has not arrived as a whole.
void GrpcConnection::DropMessage(Stream* stream) {
  if (stream->held != nullptr) stream->held->Release(stream->message.size());
  stream->message = {};
}

// The stream itself may live until the client has read what was framed.
void GrpcConnection::CloseCall(Stream* stream) {
  DropMessage(stream);
  if (stream->held != nullptr) stream->held->Release(stream->unread());
  stream->held = nullptr;
  stream->outgoing = {};
  stream->read_bytes = 0;
  if (shared_.calls.erase(stream->call) != 0) shared_.handler.OnClosed(stream->call);
}

}  // namespace persia::serving

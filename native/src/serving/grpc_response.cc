// The server's half of a call.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "serving/grpc_stream.h"
#include "serving/grpc_text.h"

namespace persia::serving {
namespace {

// Messages that wait for a client that does not read; a single one may have more.
constexpr size_t kMaxUnread = 1 << 20;

// `name` and `value` must outlive the submission.
nghttp2_nv Header(std::string_view name, std::string_view value, uint8_t flags = 0) {
  const auto* name_bytes = reinterpret_cast<const uint8_t*>(name.data());
  const auto* value_bytes = reinterpret_cast<const uint8_t*>(value.data());
  return {const_cast<uint8_t*>(name_bytes), const_cast<uint8_t*>(value_bytes), name.size(),
          value.size(), flags};
}

}  // namespace

void GrpcConnection::Send(int32_t id, std::string message) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->is_finished) return;
  if (stream->unread() > kMaxUnread) return Reset(stream, NGHTTP2_ENHANCE_YOUR_CALM);
  if (stream->unread() == 0) stream->taken_at = Clock::now();
  const auto size = static_cast<uint32_t>(message.size());
  std::string& framed = stream->outgoing;
  framed.reserve(framed.size() + kPrefixBytes + message.size());
  framed.push_back('\0');
  for (int shift = 24; shift >= 0; shift -= 8) framed.push_back(static_cast<char>(size >> shift));
  framed.append(message);
  stream->held->Add(kPrefixBytes + message.size());
  Respond(stream);
}

void GrpcConnection::Finish(int32_t id, GrpcCode code, std::string text) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->is_finished) return;
  stream->is_finished = true;
  if (code == GrpcCode::kResourceExhausted) ++shared_.num_refused;
  stream->code = code;
  stream->text = PercentEncoded(text);
  DropMessage(stream);
  stream->taken_at = Clock::now();
  Respond(stream);
}

// Begins the response, or continues it after there was nothing to send.
void GrpcConnection::Respond(Stream* stream) {
  if (stream->is_deferred) {
    stream->is_deferred = false;
    Check(nghttp2_session_resume_data(session_, stream->id));
  }
  if (std::exchange(stream->has_responded, true)) return;
  const std::string code = std::to_string(static_cast<uint32_t>(stream->code));
  const std::array<nghttp2_nv, 5> headers = {
      Header(":status", "200"), Header("content-type", "application/grpc"),
      Header("grpc-accept-encoding", "identity,gzip,deflate"), Header("grpc-status", code),
      Header("grpc-message", stream->text, NGHTTP2_NV_FLAG_NO_INDEX)};
  if (stream->is_finished && stream->outgoing.empty()) {
    Check(nghttp2_submit_response(session_, stream->id, headers.data(),
                                  stream->text.empty() ? 4 : 5, nullptr));
    return;
  }
  const nghttp2_data_provider provider = {.source = {.ptr = stream},
                                          .read_callback = &ReadOutgoing};
  Check(nghttp2_submit_response(session_, stream->id, headers.data(), 3, &provider));
}

// A client of another protocol; gRPC's own would read a status of HTTP as one of gRPC.
void GrpcConnection::RefuseHttp(Stream* stream, std::string_view status) {
  stream->is_finished = stream->has_responded = true;
  stream->taken_at = Clock::now();
  const std::array<nghttp2_nv, 1> headers = {Header(":status", status)};
  Check(nghttp2_submit_response(session_, stream->id, headers.data(), headers.size(), nullptr));
}

// Ends a call whose client does not take its answer. Now: where nothing can be written, the stream
// would be closed when the connection is.
void GrpcConnection::Reset(Stream* stream, uint32_t error) {
  Check(nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, stream->id, error));
  stream->is_finished = stream->is_reset = true;
  CloseCall(stream);
}

ssize_t GrpcConnection::ReadOutgoing(nghttp2_session*, int32_t, uint8_t* to, size_t size,
                                     uint32_t* flags, nghttp2_data_source* source, void* self) {
  auto& stream = *static_cast<Stream*>(source->ptr);
  if (stream.is_reset) return NGHTTP2_ERR_DEFERRED;
  const size_t num_read = std::min(size, stream.unread());
  if (num_read > 0) {
    std::memcpy(to, stream.outgoing.data() + stream.read_bytes, num_read);
    stream.held->Release(num_read);
    stream.taken_at = Clock::now();
  }
  stream.read_bytes += num_read;
  if (stream.unread() == 0) {
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
  Check(
      nghttp2_submit_trailer(session_, stream->id, trailers.data(), stream->text.empty() ? 1 : 2));
}

// The client need not send the rest of a request that has its answer.
int GrpcConnection::OnFrameSent(nghttp2_session* session, const nghttp2_frame* frame, void* self) {
  const bool is_last = (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0 &&
                       (frame->hd.type == NGHTTP2_HEADERS || frame->hd.type == NGHTTP2_DATA);
  if (!is_last) return 0;
  auto& connection = *static_cast<GrpcConnection*>(self);
  const Stream* stream = connection.Find(frame->hd.stream_id);
  if (stream != nullptr && !stream->has_ended) {
    connection.Check(nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                               NGHTTP2_NO_ERROR));
  }
  return 0;
}

}  // namespace persia::serving

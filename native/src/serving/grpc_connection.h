// One connection of HTTP/2 with calls of gRPC. Private to serving/.
#pragma once

#include <nghttp2/nghttp2.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "net/poller.h"
#include "net/tls.h"
#include "serving/grpc_call.h"

namespace persia::serving {

class GrpcConnection;

// What the connections of a server share. Only on the server's thread.
struct GrpcShared {
  struct Place {
    GrpcConnection* connection;
    int32_t stream;
  };

  GrpcShared(GrpcOptions bounds, CallHandler* of_calls)
      : options(std::move(bounds)), handler(*of_calls) {}

  const GrpcOptions options;
  CallHandler& handler;
  std::unordered_map<CallId, Place> calls;  // that are open
  CallId next_call = 1;
  const std::shared_ptr<HeldBytes> held_bytes = std::make_shared<HeldBytes>(0);
  uint32_t num_refused = 0;      // since the server's thread last waited
  uint32_t num_turned_away = 0;  // for lack of room, since the last look at deadlines
  bool is_overloaded = false;    // many were, lately
};

// Not thread-safe: all of it runs on the server's thread.
class GrpcConnection {
 public:
  // `tag`: its number in the server.
  GrpcConnection(net::UniqueFd socket, uint64_t tag, std::string peer, GrpcShared* shared);
  GrpcConnection(const GrpcConnection&) = delete;
  ~GrpcConnection();  // closes its calls

  // Reads what has arrived. False: the connection has ended, and is to be destroyed.
  bool Read();
  // Writes what can be written. False as above.
  bool Flush();
  // Whether Flush has something to do. A blocked one waits until it can be written to.
  bool wants_write() const {
    return is_broken_ || (!is_blocked_ && nghttp2_session_want_write(session_) != 0);
  }
  // Whether to wait until it can be written to.
  bool is_blocked() const { return is_blocked_; }
  // Bytes have left the socket and were not looked at: it will not tell of them.
  bool HasPending() const { return tls_ != nullptr && tls_->HasPending(); }

  void Send(int32_t stream, std::string message);
  void Finish(int32_t stream, GrpcCode code, std::string text);
  // Calls whose time has passed, and clients that do not read their answers. False as above.
  bool CheckTimes(net::Clock::time_point now);
  // Tells the client to begin no more calls here.
  void Drain();
  int fd() const { return socket_.get(); }
  uint64_t tag() const { return tag_; }
  bool is_idle() const { return streams_.empty(); }
  // Its client has begun a call.
  bool has_begun() const { return has_begun_; }
  // When it was accepted, if its client has begun no call yet.
  net::Clock::time_point used_at() const { return has_begun_ ? read_at_ : progress_at_; }

 private:
  using Clock = net::Clock;
  struct Stream;

  static nghttp2_session_callbacks* Callbacks();
  static int OnBeginHeaders(nghttp2_session*, const nghttp2_frame* frame, void* self);
  static int OnHeader(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                      size_t name_size, const uint8_t* value, size_t value_size, uint8_t,
                      void* self);
  static int OnData(nghttp2_session*, uint8_t, int32_t id, const uint8_t* data, size_t size,
                    void* self);
  static int OnFrame(nghttp2_session*, const nghttp2_frame* frame, void* self);
  static int OnFrameSent(nghttp2_session*, const nghttp2_frame* frame, void* self);
  static int OnStreamClosed(nghttp2_session*, int32_t id, uint32_t, void* self);
  static ssize_t ReadOutgoing(nghttp2_session* session, int32_t id, uint8_t* to, size_t size,
                              uint32_t* flags, nghttp2_data_source* source, void* self);

  Stream* Find(int32_t id);
  void BeginCall(Stream* stream);
  void TurnAway(Stream* stream, GrpcCode code, std::string text);
  void UseWindow(uint32_t size);
  void Widen(Stream* stream);
  void OnSettingsAccepted();
  void TakeHeader(Stream* stream, std::string_view name, std::string_view value);
  void TakeData(Stream* stream, std::span<const std::byte> data);
  void TakeMessage(Stream* stream);
  bool BeginMessage(Stream* stream);
  bool Hold(Stream* stream, size_t size);
  void DropMessage(Stream* stream);
  void EndOfRequest(Stream* stream);
  void Refuse(Stream* stream, GrpcCode code, std::string text);
  void Respond(Stream* stream);
  void RefuseHttp(Stream* stream, std::string_view status);
  void Reset(Stream* stream, uint32_t error);
  void SubmitTrailers(Stream* stream);
  void CloseCall(Stream* stream);
  ssize_t Receive(std::byte* to, size_t size);
  bool Write();
  bool IsLate(Clock::time_point latest) const;
  void EndLateStreams(Clock::time_point latest);
  void Check(int result);

  net::UniqueFd socket_;
  const uint64_t tag_;
  const std::string peer_;
  GrpcShared& shared_;
  const std::unique_ptr<net::TlsStream> tls_;
  nghttp2_session* session_ = nullptr;
  std::unordered_map<int32_t, std::unique_ptr<Stream>> streams_;
  std::string out_;  // bytes that were framed, the first written_ of them sent
  size_t written_ = 0;
  bool is_blocked_ = false;
  bool is_broken_ = false;
  Clock::time_point read_at_;      // when the last bytes arrived
  Clock::time_point progress_at_;  // when it was accepted, or last took something while blocked
  uint32_t stream_window_;         // what a client may send of a call before it is read
  bool is_window_accepted_ = false;
  bool has_begun_ = false;  // its client has begun a call; else it is not kept for long
};

}  // namespace persia::serving

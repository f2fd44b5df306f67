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
#include "serving/request_counts.h"

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
  uint64_t held_bytes = 0;
  uint32_t num_refused = 0;  // since the server's thread last waited
};

// Not thread-safe: all of it runs on the server's thread.
class GrpcConnection {
 public:
  GrpcConnection(net::UniqueFd socket, std::string peer, GrpcShared* shared);
  GrpcConnection(const GrpcConnection&) = delete;
  ~GrpcConnection();  // closes its calls

  // Reads what has arrived. False: the connection has ended, and is to be destroyed.
  bool Read();
  // Writes what can be written. False as above.
  bool Flush();
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
  bool is_idle() const { return streams_.empty(); }

 private:
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
  bool TakeHeader(Stream* stream, std::string_view name, std::string_view value);
  void TakeData(Stream* stream, std::span<const std::byte> data);
  void TakeMessage(Stream* stream);
  bool BeginMessage(Stream* stream);
  void EndOfRequest(Stream* stream);
  void Respond(Stream* stream);
  void RefuseHttp(Stream* stream, std::string_view status);
  void SubmitTrailers(Stream* stream);
  void CloseCall(Stream* stream);
  ssize_t Receive(std::byte* to, size_t size);
  bool Write();

  net::UniqueFd socket_;
  const std::string peer_;
  GrpcShared& shared_;
  const std::unique_ptr<net::TlsStream> tls_;
  nghttp2_session* session_ = nullptr;
  std::unordered_map<int32_t, std::unique_ptr<Stream>> streams_;
  std::string out_;  // bytes that were framed, the first written_ of them sent
  size_t written_ = 0;
  bool is_blocked_ = false;
  net::Clock::time_point read_at_;        // of the bytes that are looked at
  net::Clock::time_point must_begin_by_;  // a client that sends nothing is not kept
  bool has_begun_ = false;
};

}  // namespace persia::serving

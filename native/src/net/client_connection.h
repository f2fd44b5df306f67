// ClientConnection: the client's end of one socket, from resolving the address to its first
// failure. Private to net/.
//
// It sends frames one at a time and reports replies as they come; it knows nothing of calls,
// deadlines or retries. Members run on one thread at a time, the one that runs its io_context. A
// connection is used once: after a failure, make another.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "net/asio.h"
#include "net/handshake.h"
#include "net/message.h"

namespace persia::net {

// "host:port" as people and discovery write it.
struct Address {
  std::string host;  // a name, an IPv4 address, or an IPv6 address without its brackets
  uint16_t port = 0;
};

// kInvalidArgument names what is wrong. "[::1]:8887" is how IPv6 is written.
StatusOr<Address> ParseAddress(const std::string& text);

class ClientConnection : public std::enable_shared_from_this<ClientConnection> {
 public:
  // Never called from within a method of the connection, only from the event loop.
  class Listener {
   public:
    virtual ~Listener() = default;
    // Both ends have proved what they have to.
    virtual void OnConnected() = 0;
    virtual void OnWritten() = 0;
    virtual void OnReply(const FrameHeader& header, Buffer body) = 0;
    // The last event.
    virtual void OnBroken(const std::string& reason) = 0;
    // The last event, too: another connection would be refused like this one.
    virtual void OnRefused(const std::string& reason) = 0;
  };

  // `listener` must stay until OnBroken or Close().
  ClientConnection(asio::io_context& io, Listener* listener, uint64_t max_body_bytes,
                   const Security& security);

  void Connect(const std::string& address);
  // After OnConnected, or when the frame before is written. True: written. False: the segments are
  // read until OnWritten, OnBroken or Close().
  bool Write(const FrameHeader& header, const Segments& segments);
  // No event comes and no part is read after this returns.
  void Close();

 private:
  void LimitTime(std::chrono::milliseconds limit, bool has_next);
  void EndTimeLimit();
  // Tries the addresses of a name in their order.
  void ConnectTo(std::vector<Tcp::endpoint> endpoints);
  void Resolve(const std::string& host, uint16_t port);
  void OnConnected();
  void HandshakeTls();
  void OnTlsFailed(ssize_t received);
  void StartFrames();
  void SendHello();
  // False: the connection is closed, because the reply refuses it.
  bool TakeReply(const FrameHeader& header, Buffer body);
  void OnChallenge(const Buffer& body);
  void SendHandshake(Segments message);
  void Finish();
  void WriteRest();
  void WatchSilence();
  void CheckSilence();
  void ReadSome();
  void TakeFrames();
  void ReadBody(std::span<const std::byte> begun);
  void ReadRest(size_t num_received);
  // Closes, and reports why. The listener may destroy its reference meanwhile: handlers keep one.
  void Break(const std::string& reason);
  void Refuse(const std::string& reason);

  // Calls `then` with how many bytes have come, from the event loop.
  template <typename Function>
  void Receive(asio::mutable_buffer to, Function then);
  template <typename Function>
  void ReceiveTls(asio::mutable_buffer to, Function then);
  template <typename Function>
  auto WhileOpen(const char* doing, Function function);

  Listener* listener_;  // null: closed
  const uint64_t max_body_bytes_;
  const Security security_;
  std::unique_ptr<TlsStream> tls_;            // null: without TLS
  std::optional<ClientHandshake> handshake_;  // while it is under way
  Tcp::resolver resolver_;
  Tcp::socket socket_;
  asio::steady_timer connect_timer_;
  uint64_t connect_step_ = 0;  // that connect_timer_ limits
  asio::steady_timer silence_timer_;
  bool watches_silence_ = false;    // silence_timer_ runs
  int num_silent_intervals_ = 0;    // in a row, in which nothing was acknowledged
  std::optional<FrameWriter> out_;  // the frame that is being written
  bool write_waits_ = false;        // for room at the peer

  // Bytes that came with one read, of any number of frames: small replies cost one system call.
  // What is long is read into its Buffer.
  std::array<std::byte, 4096> ahead_;
  size_t num_ahead_ = 0;
  FrameHeader in_header_;
  Buffer in_body_;
};

}  // namespace persia::net

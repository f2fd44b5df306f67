// ClientConnection: the client's end of one socket, from resolving the address to its first
// failure. Private to net/.
//
// It sends frames one at a time and reports replies as they come; it knows nothing of calls,
// deadlines or retries. All members run on one thread, that of its io_context. A connection is used
// once: after a failure, make another.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "net/asio.h"
#include "net/message.h"

namespace persia::net {

class ClientConnection : public std::enable_shared_from_this<ClientConnection> {
 public:
  // Never called from within a method of the connection, only from the event loop.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnConnected() = 0;
    virtual void OnWritten() = 0;
    virtual void OnReply(const FrameHeader& header, Buffer body) = 0;
    // The last event.
    virtual void OnBroken(const std::string& reason) = 0;
  };

  // `listener` must stay until OnBroken or Close().
  ClientConnection(asio::io_context& io, Listener* listener, uint64_t max_body_bytes);

  void Connect(const std::string& address);
  // After OnConnected, or OnWritten of the frame before. The parts are read until OnWritten,
  // OnBroken or Close().
  void Write(const FrameHeader& header, const Parts& parts);
  // No event comes and no part is read after this returns.
  void Close();

 private:
  void ConnectTo(std::vector<Tcp::endpoint> endpoints);
  void Resolve(const std::string& host, uint16_t port);
  void OnConnected();
  void ReadHeader();
  void ReadBody();
  void Break(const std::string& reason);

  template <typename Function>
  auto WhileOpen(const char* doing, Function function);

  Listener* listener_;  // null: closed
  const uint64_t max_body_bytes_;
  Tcp::resolver resolver_;
  Tcp::socket socket_;
  asio::steady_timer connect_timer_;
  std::array<std::byte, kHeaderBytes> out_header_;
  std::array<std::byte, kHeaderBytes> in_header_bytes_;
  FrameHeader in_header_;
  Buffer in_body_;
};

}  // namespace persia::net

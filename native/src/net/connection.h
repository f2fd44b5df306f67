// Connection: the server's end of one client's socket. Private to net/.
//
// Every member runs on the socket's strand, except Start and Drain, which may be called from
// anywhere. At most one read and one write are pending at a time; handlers run on the server's pool
// and come back to the strand with their reply. Pending operations own the connection, so it lives
// exactly as long as something may still call it.
//
// Reading pauses, and the client feels it, while (1) the server's byte budget is used up, (2) too
// many requests of this connection are unanswered, or (3) too many bytes of replies are not yet
// taken by the client.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>

#include "net/asio.h"
#include "net/byte_budget.h"
#include "net/server.h"

namespace persia::net {

class Connection;

// What the connections of a server share; outlives them.
struct ServerState {
  explicit ServerState(Server::Options server_options)
      : options(std::move(server_options)), budget(options.max_inflight_bytes) {}

  const Server::Options options;
  std::array<Handler, 256> handlers;  // by method number; read-only once the server has started
  ByteBudget budget;
  std::unique_ptr<asio::thread_pool> pool;
  std::function<void(Connection*)> on_closed;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The socket's executor is a strand.
  Connection(Tcp::socket socket, ServerState& server);

  void Start();
  // Reads no further request, answers those that were read, then closes.
  void Drain();
  // On the strand, or when no thread runs the strand any more.
  void CloseNow();

 private:
  struct OutgoingFrame {
    std::array<std::byte, kHeaderBytes> header;
    Parts body;
    uint64_t size_bytes;
  };

  void ReadHeader();
  void OnHeader();
  Clock::time_point DeadlineOf(const FrameHeader& header) const;
  void AcquireBody(const FrameHeader& header);
  void ReadBody(const FrameHeader& header);
  void SkipBody(const FrameHeader& header, uint64_t remaining_bytes, Status refusal);
  void Dispatch(const FrameHeader& header);
  void ContinueReading();
  StatusOr<Parts> RunHandler(const FrameHeader& header, const Buffer& request,
                             const CallContext& context) const;

  void Reply(const FrameHeader& request, StatusOr<Parts> reply);
  void WriteNext();

  void CloseAt(Clock::time_point time);
  void MaybeFinishDrain();
  void Discard();

  template <typename Function>
  auto OnStrand(Function function);

  ServerState& server_;
  Tcp::socket socket_;
  asio::steady_timer close_timer_;  // for what must not take for ever: a body, a client's farewell

  std::array<std::byte, kHeaderBytes> header_bytes_;
  Clock::time_point received_at_;
  Buffer body_;
  ByteLease body_lease_;
  std::vector<std::byte> scratch_;  // for bytes that nobody wants

  std::deque<OutgoingFrame> outgoing_;  // the front is being written
  uint64_t outgoing_bytes_ = 0;
  uint32_t num_unanswered_ = 0;  // requests fully read whose reply is not fully written

  bool reading_ = false;  // a read, or a wait for the budget, is pending
  bool draining_ = false;
  bool finished_ = false;  // drained: our side is shut down, waiting for the client's
  bool closed_ = false;
};

}  // namespace persia::net

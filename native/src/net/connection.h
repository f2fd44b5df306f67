// Connection: the server's end of one client's socket. Private to net/.
//
// Thread-safe: any of the server's threads may bring the news that the socket is ready, or a reply.
// One mutex guards the state, and no system call that moves bytes is made under it: who reads has
// set `reading_` and owns what reading needs, who writes has set `writing_`. A request that has
// been read is handed to the server by the thread that read it, after the socket has been armed
// again for the next one.
//
// Reading pauses, which the client feels as back-pressure, while (1) the server's byte budget is
// used up, (2) too many requests of this connection are unanswered, or (3) they and the replies
// that the client has not yet taken are too many bytes.
//
// A body takes memory and budget in steps, as its bytes arrive. One that does not fill a step
// within the server's patience closes its connection, whatever deadline its header claims: what a
// client announces and does not send is never kept from others.
//
// Where the server has an identity, only the frames of the handshake are read until the client has
// proved its role. Any other frame is refused, and so is a method that the role may not call.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net/byte_budget.h"
#include "net/handshake.h"
#include "net/message.h"
#include "net/poller.h"
#include "net/types.h"

namespace persia::net {

class Connection;

// A request that has been read and is to be answered once, by Reply() of its connection.
struct Request {
  std::shared_ptr<Connection> connection;
  FrameHeader header;
  Clock::time_point deadline;
  Buffer body;
  ByteLease lease;
  Clock::time_point in_line_since{};  // where no handler was free
};

// What the connections of a server share; outlives them.
struct ServerState {
  explicit ServerState(ServerOptions server_options)
      : options(std::move(server_options)), budget(options.max_inflight_bytes) {}

  const ServerOptions options;
  // By method number; read-only once the server has started.
  std::array<Handler, 256> handlers;
  std::array<MethodId, 256> methods;
  ByteBudget budget;
  Poller poller;
  std::function<void(Request)> run;  // may run the handler before it returns
  // With the connection's tag.
  std::function<void(uint64_t)> on_closed;
  std::function<void(uint64_t)> on_proven;  // the client's role
  std::function<void()> on_refused;         // a client
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The socket does not block, and is known to the poller under `tag`, not yet armed. `peer` is the
  // client's address, for messages.
  Connection(UniqueFd socket, uint64_t tag, std::string peer, ServerState& server);

  // Arms the socket for its first request.
  void Start();
  // The poller's news. Reads one request at most, and runs its handler on this thread.
  void OnReady(uint32_t events);
  // Queues the reply and writes what the socket takes; once for each request that was run. Replies
  // of a connection that has closed are dropped.
  void Reply(const FrameHeader& request, StatusOr<Segments> reply);
  // Reads no further request, answers those that were read, then closes.
  void Drain();
  // Idempotent. A thread that is reading or writing notices when its system call fails.
  void CloseNow();
  const std::string& peer() const { return peer_; }
  // What the client has proved.
  Role role() const { return role_; }
  // Closes when its time is up; else says when that will be.
  Clock::time_point CloseIfDue(Clock::time_point now);

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Outgoing {
    Outgoing(const FrameHeader& header, Segments segments)
        : body(std::move(segments)), frame(header, body) {}
    Outgoing(const Outgoing&) = delete;  // the frame points to the body

    const Segments body;
    FrameWriter frame;
  };
  // What is being received; kRefusedBody is read and dropped, so that the connection survives a
  // method that this server does not know. kUnproven is a frame before the handshake's end, which
  // is not read.
  enum class Phase { kHeader, kBody, kRefusedBody, kHandshake, kUnproven };
  enum class Progress { kFrame, kBlocked, kAwaitsBudget, kBroken };

  void Read(Lock lock);
  Progress ReadFrame();
  Progress BeginBody();
  Phase BodyPhase() const;
  Status Refusal() const;
  Progress Receive(std::byte* to, uint64_t size_bytes);
  ssize_t ReadSome(std::byte* to, uint64_t size_bytes);
  bool HasPending() const { return tls_ != nullptr && tls_->HasPending(); }
  Progress SkipBody();
  Progress DiscardAll();
  Progress ReceiveBody();
  bool TakeStep();
  void GrowBody();
  void OnGranted(ByteLease lease);
  void FinishFrame(Lock lock);
  void FinishHandshake(Lock& lock);
  void Refuse(Lock& lock, const Status& why);
  void ReportUnprovenEnd();
  void RefuseInPlain();
  Clock::time_point Deadline() const;

  void Enqueue(Lock& lock, FrameHeader request, StatusOr<Segments> reply);
  void Flush(Lock& lock);

  bool MayRead() const;
  void UpdateInterest();
  void CloseAt(Clock::time_point time);
  void MaybeFinishDrain();
  void Close();

  ServerState& server_;
  const UniqueFd socket_;
  const uint64_t tag_;
  const std::string peer_;
  const std::unique_ptr<TlsStream> tls_;  // null: without TLS

  // Of who has set reading_.
  Phase phase_ = Phase::kHeader;
  uint64_t num_received_ = 0;  // bytes of what the phase is about
  std::array<std::byte, kHeaderBytes> header_bytes_;
  FrameHeader header_;
  Clock::time_point received_at_;
  Buffer body_;  // the first step of it, or all
  ByteLease body_lease_;
  uint64_t num_granted_ = 0;                  // bytes of the body that the lease holds
  std::vector<std::byte> scratch_;            // for bytes that nobody wants
  std::optional<ServerHandshake> handshake_;  // none once the client has proved its role
  std::array<std::byte, sizeof(Hello)> handshake_bytes_;
  Role role_ = Role::kNone;  // constant from the first request on

  // Guards what follows. The server's and the poller's mutexes are taken under it, and no lease is
  // given back: that may lead into another connection.
  std::mutex mutex_;
  std::deque<Outgoing> outgoing_;  // the front is being written; of who has set writing_
  uint64_t held_bytes_ = 0;  // of requests in line or being handled, and of replies not yet taken
  uint32_t num_unanswered_ = 0;  // requests fully read whose reply is not fully written
  uint32_t armed_ = 0;           // the events that the poller will tell of, once
  Clock::time_point close_at_ = Clock::time_point::max();
  uint64_t timed_step_ = 0;  // the step of the body (its num_granted_) that close_at_ is about
  bool reading_ = false;     // somebody reads, or the budget is waited for
  bool writing_ = false;
  bool write_blocked_ = false;  // the socket is full
  bool draining_ = false;
  bool finished_ = false;  // drained: our side is shut down, waiting for the client's
  bool closed_ = false;
};

}  // namespace persia::net

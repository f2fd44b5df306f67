// Channel: calls to one peer, which may restart and come back under another address.
//
// Call() may be used from any number of threads at once. Connections are opened on demand, kept and
// shared. A call whose connection breaks, or whose peer answers kUnavailable, is repeated with
// exponential backoff (jittered, at most 500 ms) until the deadline: every method of this system is
// idempotent, by key where it changes something. SetAddress() may come at any time, also while
// calls wait. Each wait has a deadline. Failures name the peer: "embedding-worker 0 at
// 127.0.0.1:8887: connection refused".
//
// A peer that refuses this process's credentials, or lacks its own, fails all pending calls at once
// with kPermissionDenied: waiting does not mend them. A later call tries again.
//
// One thread at a time, the leader, runs the event loop and owns everything that is marked as the
// leader's, so that needs no lock; others post to it. The leader is either a caller blocked in
// Call(), which so writes its request and reads its reply itself, without waking another thread, or
// the channel's own thread. That thread leads while an asynchronous call is pending, for callbacks
// run on no other, and when the channel has been idle for a moment, to notice that the peer has
// gone.
//
// A thread for each channel, rather than one for the process: large replies of different peers are
// received in parallel, a slow callback holds up one peer only, and nothing global has to be torn
// down when the process exits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/metrics.h"
#include "base/status.h"
#include "base/trace_buffer.h"
#include "net/client_connection.h"
#include "net/types.h"

namespace persia::net {

class Channel : private ClientConnection::Listener {
 public:
  // `peer` names the other end in every error and metric, before its address is known.
  struct Options {
    std::string peer;  // for messages: "parameter-server 1"
    // Of requests and replies alike. A larger request is refused with kInvalidArgument before a
    // byte is sent; a larger reply breaks the connection.
    uint64_t max_body_bytes = 1ull << 30;
    Security security = Security::OfProcess();
  };
  // Runs without a lock of the channel, so it may make further asynchronous calls.
  using Done = std::function<void(StatusOr<Buffer>)>;

  // Starts the channel's own thread and opens no connection.
  explicit Channel(Options options);
  // Fails what is pending with kUnavailable, and returns when the callbacks have run. No call may
  // be blocked in Call(), and a callback must not destroy its own channel: the thread that it runs
  // on is waited for.
  ~Channel() override;
  Channel(const Channel&) = delete;

  // "host:port". Until the first call of this, calls wait (until their deadline).
  // Another address closes the present connection; calls that had been sent are repeated at the new
  // one. The same address again ends a pause before the next attempt, because the peer has just
  // said that it is back. An address that does not parse fails calls at their deadlines, with the
  // reason.
  void SetAddress(const std::string& address);

  // Fails with kUnavailable what is pending and every later call. From any thread; does not wait.
  void Close();

  // Sends the segments as one frame and waits for the answer's body. `segments` must stay as they
  // are until it returns. kInternal from a callback of this channel, which would wait for itself.
  // Blocks until the answer, or until the deadline, which a passed one does at once. The failures
  // of the peer's handler keep their codes.
  StatusOr<Buffer> Call(const MethodId& method, const Segments& segments,
                        Clock::time_point deadline);

  // The same without blocking the caller, for fan-out:
  // `done` runs exactly once, on the channel's own thread, and must not block for long.
  // What `segments` views must stay until `done` has run. A callback is destroyed after it has run,
  // on the same thread.
  void CallAsync(const MethodId& method, Segments segments, Clock::time_point deadline, Done done);

  // What was counted since the channel was made.
  // From any thread; takes no lock.
  ChannelStats stats() const;
  const std::string& peer() const { return peer_; }

 private:
  // Of a call. Only kWriting forbids to complete it: the socket reads memory of the caller.
  enum class State {
    kWaiting,     // for a connection, or for its turn on it
    kWriting,     // its segments are being read by the socket
    kSent,        // for its reply
    kBackingOff,  // the peer answered kUnavailable
  };
  // One call from its submission to its answer. The leader owns it, in calls_.
  struct PendingCall {
    const MethodId method;
    const Segments segments;
    const Clock::time_point deadline;
    const bool async;
    const Done done;
    State state = State::kWaiting;
    const Clock::time_point begin = Clock::now();
    // Taken on the caller's thread, because the leader that writes the request may work for another
    // batch.
    const uint32_t batch = TracedBatch::tag();  // the caller's
    uint32_t num_writes = 0;
    // Answers kUnavailable so far: the pause before the next try grows with them.
    uint32_t num_refusals = 0;
    std::string refusal = {};                                        // the peer's last kUnavailable
    std::optional<std::pair<FrameHeader, Buffer>> early_reply = {};  // came while kWriting
    std::optional<asio::steady_timer> retry_timer = {};
  };
  using PendingCallPtr = std::unique_ptr<PendingCall>;
  // What a caller that waits for its answer waits on. Guarded by lead_mutex_.
  struct BlockedCaller {
    std::optional<StatusOr<Buffer>> answer;
    std::condition_variable wakes;  // answered, or free to take the lead
  };
  // By request id. Ids grow, so the order of a map is that of the calls.
  // A request id is used once in a channel's life, so a late reply to a call that has ended is
  // recognised as such.
  using Calls = std::map<uint64_t, PendingCallPtr>;
  using Lock = std::unique_lock<std::mutex>;

  // The lead. TakeLead() and WakeNextLeader() require lead_mutex_; a thread that leads gives the
  // lead back before it waits for anything but the event loop.
  // The channel's own thread: sleeps, leads while asynchronous calls are pending, and watches an
  // idle connection.
  void RunThread();
  void LeadOnOwnThread();
  // On the thread of a blocked caller. Returns as well when an asynchronous call waits, which only
  // the channel's thread may complete.
  void LeadUntilAnswered(const BlockedCaller& caller);
  bool TakeLead();
  void WakeNextLeader();
  // Requires lead_mutex_.
  bool ThreadWanted() const { return num_posted_ > 0 || !deferred_.empty(); }
  // Runs `function` on the leader, after what was posted before. Wakes the channel's thread where
  // nobody leads.
  template <typename Function>
  void Post(Function function);
  bool OnOwnThread() const { return std::this_thread::get_id() == thread_.get_id(); }

  // Events of connection_, on the leader.
  void OnConnected() override;
  void OnWritten() override;
  void OnReply(const FrameHeader& header, Buffer body) override;
  void OnBroken(const std::string& reason) override;
  void OnRefused(const std::string& reason) override;

  // The life of a call, on the leader: waiting, written, sent, and completed exactly once; or
  // backing off, and waiting again.
  void SubmitAsync(PendingCallPtr call);
  // Gives the call its id; it may complete within Submit(), when its deadline has passed or the
  // channel is closed.
  void Submit(PendingCallPtr call);
  // Called after every event that may let a waiting call go on. Idempotent.
  void Pump();
  void WriteNext();
  // SetAddress() on the leader.
  void ChangeAddress(const std::string& address);
  // Calls that were being written or had been sent wait again: their methods are idempotent, so
  // sending them a second time is safe. After it returns no segment of a caller is read.
  void CloseConnection();
  void RetryLater(uint64_t id, PendingCall& call);
  void MakeWaiting(uint64_t id, PendingCall& call);
  // Moves the one timer forward where this deadline is earlier than those that it knows.
  void WatchDeadline(Clock::time_point deadline);
  void OnDeadlineTimer();
  Status DeadlineStatus(const PendingCall& call) const;
  // Ends the call: its callback runs here. It may submit further calls, so no reference into calls_
  // survives this.
  void Complete(uint64_t id, StatusOr<Buffer> result);
  // Attempts count from 0.
  std::chrono::milliseconds Backoff(uint32_t attempt);
  std::string Name() const { return address_.empty() ? peer_ : peer_ + " at " + address_; }

  const std::string peer_;
  const uint64_t max_body_bytes_;
  const Security security_;
  std::thread thread_;

  // Counted by the leader, read by any thread.
  // From submission to completion, pauses and repetitions included: what a caller waits.
  DurationStats call_times_{"rpc to " + peer_};
  CounterList counters_;
  Counter num_calls_{counters_, {"num_calls", "persia_rpc_calls", "Calls made."}};
  Counter num_retries_{counters_,
                       {"num_retries", "persia_rpc_retries",
                        "Requests sent again, after a broken connection or a refusal."}};
  Counter num_connects_{counters_, {"num_connects", "persia_rpc_connects", "Connections made."}};
  Counter num_sent_bytes_{
      counters_,
      {"num_sent_bytes", "persia_rpc_call_sent_bytes", "Bytes of requests, each time sent."}};
  Counter num_received_bytes_{
      counters_,
      {"num_received_bytes", "persia_rpc_call_received_bytes", "Bytes of replies received."}};
  // Calls that have ended. With num_calls_ it gives those under way, without a lock.
  std::atomic<uint64_t> num_completed_{0};

  std::mutex lead_mutex_;   // guards what follows
  bool led_ = false;        // there is a leader
  uint64_t num_leads_ = 0;  // since the channel was made
  // In the order in which they came: the first is woken to lead next. Each entry is on its caller's
  // stack and leaves with it.
  std::vector<BlockedCaller*> blocked_;
  size_t num_posted_ = 0;  // and not yet run
  // Asynchronous calls, until the channel's own thread leads. Changed by the leader only, who may
  // look at it without the mutex.
  std::vector<PendingCallPtr> deferred_;
  std::condition_variable thread_wakes_;

  // The leader's, from here on.
  // Made for one thread at a time. Who leads runs it; posting is safe from any.
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  asio::steady_timer reconnect_timer_{io_};
  asio::steady_timer deadline_timer_{io_};
  Clock::time_point deadline_timer_at_ = Clock::time_point::max();  // max: not set
  // For the jitter of pauses alone.
  std::minstd_rand random_;

  std::string address_;
  std::shared_ptr<ClientConnection> connection_;
  bool connected_ = false;     // connection_ is open, not just opening
  bool backing_off_ = false;   // reconnect_timer_ runs
  uint32_t num_failures_ = 0;  // of connections, since the last reply
  // Why the last connection broke, until a reply comes: the reason that an expired call tells.
  std::string last_failure_;

  Calls calls_;
  size_t num_async_ = 0;             // of calls_
  std::set<uint64_t> waiting_;       // ids of the calls that are kWaiting
  std::optional<uint64_t> writing_;  // the connection is busy with this call
  uint64_t next_id_ = 1;
  bool closed_ = false;
  bool quit_ = false;  // the channel's thread is to end
};

}  // namespace persia::net

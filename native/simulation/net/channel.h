// net::Channel over the Wire: the interface and the rules of src/net/channel.h, without sockets.
//
// Repeats a call whose connection breaks, or whose peer answers kUnavailable, until its deadline.
// Calls are sent in the order in which they were made, and those that are repeated before later
// ones.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/buffer.h"
#include "base/status.h"
#include "net/types.h"
#include "wire.h"

namespace persia::net {

class Channel {
 public:
  struct Options {
    std::string peer;
    uint64_t max_body_bytes = 1ull << 30;
    Security security = {};
  };
  using Done = std::function<void(StatusOr<Buffer>)>;

  explicit Channel(Options options);
  ~Channel();
  Channel(const Channel&) = delete;

  void SetAddress(const std::string& address);
  void Close();
  StatusOr<Buffer> Call(const MethodId& method, const Segments& segments,
                        Clock::time_point deadline);
  void CallAsync(const MethodId& method, Segments segments, Clock::time_point deadline, Done done);
  ChannelStats stats() const { return {.name = peer_, .metrics = {}, .calls = {}}; }
  const std::string& peer() const { return peer_; }

 private:
  enum class State { kWaiting, kSent, kBackingOff };
  struct PendingCall {
    MethodId method;
    std::shared_ptr<std::vector<std::byte>> body;
    simulation::Time deadline;
    Done done;
    State state = State::kWaiting;
    uint32_t num_refusals = 0;
    std::string refusal = {};
  };

  void Submit(const MethodId& method, const Segments& segments, Clock::time_point deadline,
              Done done);
  void Pump();
  void Send(uint64_t id, PendingCall& call);
  void OnReply(uint64_t id, StatusCode code, Buffer body);
  void OnBroken(const std::string& reason);
  void Disconnect();
  void Complete(uint64_t id, StatusOr<Buffer> result);
  Status DeadlineStatus(const PendingCall& call) const;
  simulation::Time Backoff(uint32_t attempt);
  // `event` as this channel's process, unless the channel has ended.
  std::function<void()> Mine(std::function<void()> event);

  const std::string peer_;
  const int process_;
  const std::shared_ptr<bool> lives_ = std::make_shared<bool>(true);
  std::string address_;
  simulation::ConnectionPtr connection_;
  uint64_t attempt_ = 0;  // of connecting; an older one counts no more
  bool connecting_ = false;
  bool backing_off_ = false;
  uint32_t num_failures_ = 0;
  std::string last_failure_;
  std::map<uint64_t, PendingCall> calls_;
  uint64_t next_id_ = 1;
  bool closed_ = false;
};

}  // namespace persia::net

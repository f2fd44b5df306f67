// PrefetchHints: what one parameter server is told of lookups to come.
//
// Whether it has any use for that it says itself, asked without signs, once. Hints are bounded: of
// a server that has not answered the ones before, further ones are dropped.
//
// Thread-safe. Answers may come when the caller is gone, so they share ownership.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "net/channel.h"
#include "worker/row_service.h"

namespace persia::worker {

class PrefetchHints {
 public:
  // How long an answer is waited for. Long: a call that ends half way ends the connection, which
  // lookups and updates share, and of open hints there are few.
  explicit PrefetchHints(std::chrono::milliseconds patience = std::chrono::seconds(60))
      : patience_(patience) {}

  // As far as is known; asks where nothing is. Returns at once.
  static bool IsWanted(const std::shared_ptr<PrefetchHints>& hints, net::Channel* channel);
  // Nothing where the server does not want them.
  static HintReport Send(const std::shared_ptr<PrefetchHints>& hints,
                         std::span<const uint64_t> signs, net::Channel* channel);
  // Another server may be in its place.
  void Forget() { state_ = State::kUnknown; }

 private:
  enum class State : uint8_t { kUnknown, kAsked, kWanted, kUnwanted };

  static void Call(const std::shared_ptr<PrefetchHints>& hints, std::span<const uint64_t> signs,
                   net::Channel* channel);
  static State StateAfter(StatusOr<Buffer> reply);
  void TakeReply(StatusOr<Buffer> reply);

  const std::chrono::milliseconds patience_;
  std::atomic<State> state_ = State::kUnknown;
  std::atomic<uint32_t> num_open_ = 0;
};

}  // namespace persia::worker

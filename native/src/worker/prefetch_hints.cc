#include "worker/prefetch_hints.h"

#include <chrono>
#include <utility>
#include <vector>

#include "base/row_protocol.h"

namespace persia::worker {
namespace {

// A server that lags behind gets fewer hints, not a queue of old ones.
constexpr uint32_t kMaxOpen = 4;

}  // namespace

bool PrefetchHints::IsWanted(const std::shared_ptr<PrefetchHints>& hints, net::Channel* channel) {
  State state = hints->state_;
  if (state == State::kUnknown && hints->state_.compare_exchange_strong(state, State::kAsked)) {
    ++hints->num_open_;
    Call(hints, {}, channel);
  }
  return state == State::kWanted;
}

HintReport PrefetchHints::Send(const std::shared_ptr<PrefetchHints>& hints,
                               std::span<const uint64_t> signs, net::Channel* channel) {
  if (signs.empty() || hints->state_ != State::kWanted) return {};
  // Added first and taken back, so that two threads cannot both find the last place.
  if (++hints->num_open_ > kMaxOpen) {
    --hints->num_open_;
    return {.num_signs = signs.size(), .num_dropped = signs.size()};
  }
  Call(hints, signs, channel);
  return {.num_signs = signs.size()};
}

void PrefetchHints::Call(const std::shared_ptr<PrefetchHints>& hints,
                         std::span<const uint64_t> signs, net::Channel* channel) {
  const auto bytes = std::as_bytes(signs);
  Segments segments;
  segments.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
  channel->CallAsync(kPrefetchRows, std::move(segments),
                     std::chrono::steady_clock::now() + hints->patience_,
                     [hints](StatusOr<Buffer> reply) { hints->TakeReply(std::move(reply)); });
}

// Who did not answer is asked anew; who does not know the method (docs/wire_format.md) has no use
// for it.
PrefetchHints::State PrefetchHints::StateAfter(StatusOr<Buffer> reply) {
  if (!reply.ok()) {
    const bool is_refused = reply.status().code() == StatusCode::kInvalidArgument;
    return is_refused ? State::kUnwanted : State::kUnknown;
  }
  auto answer = DecodeMessage<PrefetchRowsReply>(std::as_const(*reply).span());
  return answer.ok() && answer->is_wanted != 0 ? State::kWanted : State::kUnwanted;
}

void PrefetchHints::TakeReply(StatusOr<Buffer> reply) {
  --num_open_;
  // Compared and exchanged below: Forget() may come at any time, and an answer of the server before
  // must not be taken for one of its successor.
  State known = state_;
  if (known == State::kUnknown) return;  // of a server that has gone
  state_.compare_exchange_strong(known, StateAfter(std::move(reply)));
}

}  // namespace persia::worker

// Typed RPC: a client's stub and a server's handler for each Method (base/method.h).
//
// Call() and CallAll() are the stubs: they encode the request, wait for the reply until the
// deadline, decode it, and name the peer where it does not decode. MakeHandler() is the server's
// side: it decodes the request, runs a typed function and encodes what that returns.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "net/channel.h"
#include "net/server.h"

namespace persia::net {

// Prefixes what is wrong with a message, which the message itself does not know.
// The code stays, so that callers decide as before; only the text changes.
inline Status AboutMessage(const std::string& subject, const Status& status) {
  return {status.code(), subject + ": " + status.message()};
}

// `function` is called with (const Request&, const CallContext&) and returns a Result<Reply>.
// `decoding` measures the time that requests take to decode.
// What `function` captures must live as long as the server has the handler. It runs on several
// threads at once. The request's views point into the body, which lives until `function` has
// returned; a reply must own what it needs beyond that.
template <typename Request, typename Reply, typename Function>
Handler MakeHandler(const Method<Request, Reply>& method, Function function,
                    DurationStats* decoding = nullptr) {
  return [method, function = std::move(function), decoding](
             const Buffer& body, const CallContext& context) -> StatusOr<Segments> {
    // Ended by hand: only decoding is measured, and only where the caller asked for it.
    std::optional<Timed> timed;
    if (decoding != nullptr) timed.emplace(*decoding);
    auto request = DecodeMessage<Request>(body.span());
    timed.reset();
    if (!request.ok()) {
      return AboutMessage("a " + std::string(method.name) + " request", request.status());
    }
    Result<Reply> reply = function(std::as_const(*request), context);
    // A method without a reply body has no value to encode: its Status is all that there is.
    if constexpr (std::is_same_v<Reply, Empty>) {
      PERSIA_RETURN_IF_ERROR(reply);
      return Segments();
    } else {
      if (!reply.ok()) return reply.status();
      return EncodeMessage<Reply>(std::move(reply).value());
    }
  };
}

// kCorruption names the peer and the method: a reply that does not decode is a fault of the peer,
// or of a peer of another version.
// Separate from Call(), because the replies of CallAll() are decoded by the thread that waits for
// them all, not by the channels' threads.
template <typename Reply>
StatusOr<Reply> DecodeReply(const MethodId& method, const std::string& peer, Buffer body) {
  auto reply = DecodeMessage<Reply>(std::move(body));
  if (reply.ok()) return reply;
  return AboutMessage(peer + ": a " + std::string(method.name) + " reply", reply.status());
}

// What the request views must stay until it returns.
// Blocks this thread, which reads the reply itself where no other call of the channel leads.
template <typename Request, typename Reply>
Result<Reply> Call(Channel& channel, const Method<Request, Reply>& method, Request request,
                   Clock::time_point deadline) {
  PERSIA_ASSIGN_OR_RETURN(
      Buffer body, channel.Call(method, EncodeMessage<Request>(std::move(request)), deadline));
  auto reply = DecodeReply<Reply>(method, channel.peer(), std::move(body));
  if constexpr (std::is_same_v<Reply, Empty>) {
    return reply.status();
  } else {
    return reply;
  }
}

// Calls several peers at the same time: requests[i], which may view the caller's memory, over
// channels[i]. Returns the replies in the order of the calls, or the
// failure to report: kFailedPrecondition goes before others, because it is the one that the caller
// can mend (by configuring the peer) before it tries again; otherwise the first.
//
// Every call has ended when it returns, also when one failed early: what the segments view is the
// caller's own again. Not for callbacks of a channel.
// The channels must outlive the call, and may repeat: two requests to one peer are two calls.
// Without channels it returns at once.
StatusOr<std::vector<Buffer>> CallAll(const MethodId& method, std::span<Channel* const> channels,
                                      std::vector<Segments> requests, Clock::time_point deadline);

// The same, typed.
// As many requests as channels. A reply that does not decode fails all, naming its peer.
// Where one peer is slow, its reply is waited for until the deadline, and the replies of the others
// wait with it.
template <typename Request, typename Reply>
StatusOr<std::vector<Reply>> CallAll(const Method<Request, Reply>& method,
                                     std::span<Channel* const> channels,
                                     std::vector<Request> requests, Clock::time_point deadline) {
  // All are encoded before the first is sent, so that no peer waits for another's encoding.
  std::vector<Segments> segments;
  for (Request& request : requests) segments.push_back(EncodeMessage(std::move(request)));
  PERSIA_ASSIGN_OR_RETURN(auto bodies,
                          CallAll(MethodId(method), channels, std::move(segments), deadline));
  std::vector<Reply> replies;
  for (size_t i = 0; i < channels.size(); ++i) {
    PERSIA_ASSIGN_OR_RETURN(Reply reply,
                            DecodeReply<Reply>(method, channels[i]->peer(), std::move(bodies[i])));
    replies.push_back(std::move(reply));
  }
  return replies;
}

}  // namespace persia::net

// Fan-out: one call to each of several peers, at the same time.
#pragma once

#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "net/channel.h"
#include "worker/row_service.h"

namespace persia::worker {

struct OutgoingCall {
  net::Channel* channel = nullptr;
  net::Parts parts;  // may view the caller's memory
};

// The replies, in the order of the calls. Every call has ended when it returns, also when one
// failed early: what the parts view is the caller's own again. Not for callbacks of a channel.
std::vector<StatusOr<Buffer>> CallAll(net::Method method, std::vector<OutgoingCall> calls,
                                      Deadline deadline);

// Ok, or the failure to report. kFailedPrecondition goes before others, for it is the one that the
// caller can mend (by configuring the peer) before it tries again; otherwise the first.
Status FirstFailure(std::span<const StatusOr<Buffer>> replies);

}  // namespace persia::worker

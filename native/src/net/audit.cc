#include "net/audit.h"

#include <chrono>
#include <cstdio>
#include <deque>
#include <mutex>
#include <utility>

namespace persia::net {
namespace {

// One for the process, as a server and a channel may record in the same one. The two limits are
// apart: a flood of refusals must not silence what an operator has to mend.
struct AuditRing {
  std::mutex mutex;
  std::deque<AuditEvent> events;
  RateLimit refusals{10};
  RateLimit warnings{1};
};

AuditRing& Ring() {
  static auto* const ring = new AuditRing;  // never destroyed: servers may outlive statics
  return *ring;
}

// The wall clock, not the monotonic one: events are compared with logs of other machines.
double UnixTime() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

// A window of one second instead of a token bucket: up to twice the rate around its border, and two
// numbers of state.
bool RateLimit::Permit() {
  const long now = static_cast<long>(UnixTime());
  if (second_ != now) num_permitted_ = 0;
  second_ = now;
  return num_permitted_++ < per_second_;
}

void RecordAuditEvent(AuditEvent event) {
  event.time_s = UnixTime();
  AuditRing& ring = Ring();
  const std::lock_guard lock(ring.mutex);
  // The oldest ones go: what has just happened is more likely to be still under way.
  if (ring.events.size() == kMaxAuditEvents) ring.events.pop_front();
  ring.events.push_back(std::move(event));
}

std::vector<AuditEvent> TakeAuditEvents() {
  AuditRing& ring = Ring();
  const std::lock_guard lock(ring.mutex);
  std::vector<AuditEvent> taken(std::make_move_iterator(ring.events.begin()),
                                std::make_move_iterator(ring.events.end()));
  ring.events.clear();
  return taken;
}

// The lock is released before stderr is written to, which may block on a slow terminal or pipe, and
// taken again for the event: a refusal permitted here is always recorded.
void ReportRefusal(const std::string& peer, Role role, std::string_view method,
                   const std::string& reason) {
  {
    AuditRing& ring = Ring();
    const std::lock_guard lock(ring.mutex);
    if (!ring.refusals.Permit()) return;
  }
  std::fprintf(stderr, "persia: refused %.*s from %s: %s\n", static_cast<int>(method.size()),
               method.data(), peer.c_str(), reason.c_str());
  RecordAuditEvent(
      {.peer = peer, .role = role, .method = std::string(method), .outcome = "refused: " + reason});
}

bool WarnOperator(const std::string& line) {
  {
    AuditRing& ring = Ring();
    const std::lock_guard lock(ring.mutex);
    if (!ring.warnings.Permit()) return false;
  }
  std::fprintf(stderr, "persia: %s\n", line.c_str());
  return true;
}

}  // namespace persia::net

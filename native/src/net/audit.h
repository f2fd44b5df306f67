// The audit events of this process: who changed settings or rows over RPC, and who was refused.
//
// A ring of kMaxAuditEvents: where nobody takes the events, the oldest are dropped. Thread-safe.
// Native code only records; Python (persia/security/audit.py) takes the events, and writes them to
// the audit log. Recording never blocks on a file: it happens on the threads that serve requests.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/role.h"

namespace persia::net {

inline constexpr size_t kMaxAuditEvents = 4096;

struct AuditEvent {
  double time_s = 0;      // Unix time
  std::string peer = {};  // "127.0.0.1:40112"
  Role role = Role::kNone;
  std::string method = {};   // of a refused connection: "connect"
  std::string outcome = {};  // "ok", "refused: <reason>" or "failed: <status>"
};

// Stamps the event with the time and keeps it.
void RecordAuditEvent(AuditEvent event);
// Removes and returns all, the oldest first.
// For one consumer in the process: an event is given out once.
std::vector<AuditEvent> TakeAuditEvents();

// Permits `per_second` of what strangers can cause at will: log lines and audit events.
class RateLimit {
 public:
  explicit RateLimit(int per_second) : per_second_(per_second) {}
  // Not thread-safe: the caller has a lock.
  bool Permit();

 private:
  const int per_second_;
  long second_ = 0;
  int num_permitted_ = 0;
};

// Records a refused connection or request, and writes a line to stderr. At most ten a second in
// all: strangers must not fill the log, nor push the other events out of the ring.
void ReportRefusal(const std::string& peer, Role role, std::string_view method,
                   const std::string& reason);
// One line on stderr, for what an operator has to mend. At most one a second; false: it was
// dropped.
bool WarnOperator(const std::string& line);

}  // namespace persia::net

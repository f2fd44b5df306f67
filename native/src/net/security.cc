#include "net/security.h"

#include <mutex>
#include <utility>

namespace persia::net {
namespace {

std::mutex process_mutex;
Security process_security;  // guarded by process_mutex

}  // namespace

Security Security::OfProcess() {
  const std::lock_guard lock(process_mutex);
  return process_security;
}

void Security::SetIdentity(Identity identity) {
  const std::lock_guard lock(process_mutex);
  process_security.identity = std::make_shared<const Identity>(std::move(identity));
}

void Security::SetTls(std::shared_ptr<TlsFiles> tls) {
  const std::lock_guard lock(process_mutex);
  process_security.tls = std::move(tls);
}

void Security::Clear() {
  const std::lock_guard lock(process_mutex);
  process_security = {};
}

}  // namespace persia::net

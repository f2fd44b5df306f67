// What the connections of a process prove and demand: its identity and its TLS files.
//
// Both belong to the process. Servers and channels take them when they are made, so they are set
// before. Without an identity nothing is proved or demanded: native tests, jobs in one process.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>

#include "base/role.h"
#include "base/status.h"
#include "net/tls.h"

namespace persia::net {

// Derived from the job's secret for one role: HMAC-SHA256, persia/security/.
// A process has the key of its own role and of those that it accepts, not the secret: with
// the key of a data loader nothing can pass for an admin.
using RoleKey = std::array<std::byte, 32>;

// A role, its key, and the keys of the roles that servers of this process accept.
// `accepted` decides who may connect at all; the RoleSet of a method then decides what that role
// may call.
struct Identity {
  Role role = Role::kNone;
  RoleKey key = {};
  std::map<Role, RoleKey> accepted = {};
};

// Shared pointers, because servers and channels outlive a change: each keeps the identity that it
// was made with, and certificates that are renewed reach new connections through the same TlsFiles.
struct Security {
  std::shared_ptr<const Identity> identity = nullptr;
  std::shared_ptr<TlsFiles> tls = nullptr;

  // As it is now; a copy. Thread-safe, like the setters.
  static Security OfProcess();
  static void SetIdentity(Identity identity);
  static void SetTls(std::shared_ptr<TlsFiles> tls);
  // Back to no identity and no TLS, for tests that share a process.
  static void Clear();
};

}  // namespace persia::net

// The handshake of an RPC connection: both ends prove that they have the key of the client's role.
//
// The client sends a hello, the server answers with a challenge that carries its own proof, and the
// client sends its proof; its calls may follow at once. Proofs are HMAC-SHA256 over both nonces, so
// none fits another connection, nor another TLS session. docs/wire_format.md has the layout, ADR 25
// what this protects.
//
// Plain data and functions that know no socket. What arrives has been checked for its length alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/method.h"
#include "base/status.h"
#include "net/security.h"

namespace persia::net {

// The only method that a server with an identity reads before the client has proved itself.
inline constexpr MethodId kAuthenticate{0, "Authenticate"};

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;

struct Hello {
  uint8_t version = 1;
  Role role = Role::kNone;
  std::array<uint8_t, 6> reserved = {};
  Nonce nonce = {};
};
static_assert(sizeof(Hello) == 40);

struct Challenge {
  Nonce nonce = {};
  Proof proof = {};  // the server's
};
static_assert(sizeof(Challenge) == 64);

// The client's side.
class ClientHandshake {
 public:
  ClientHandshake(const Identity& identity, const ChannelBinding& binding);

  const Hello& hello() const { return hello_; }
  // The proof to send. kPermissionDenied: the peer does not have the key of this role.
  StatusOr<Proof> Answer(std::span<const std::byte> challenge) const;

 private:
  const RoleKey key_;
  const ChannelBinding binding_;
  Hello hello_;
  bool drawn_ = false;  // the nonce is random
};

// The server's side.
class ServerHandshake {
 public:
  // Each takes one message, which is refused with kPermissionDenied.
  StatusOr<Challenge> OnHello(const Identity& identity, std::span<const std::byte> hello,
                              const ChannelBinding& binding);
  Status OnProof(std::span<const std::byte> proof) const;
  // What the client says it is, from the hello on.
  Role role() const { return role_; }
  // Of the message that must come next.
  size_t wanted_bytes() const { return greeted_ ? sizeof(Proof) : sizeof(Hello); }
  bool greeted() const { return greeted_; }

 private:
  Role role_ = Role::kNone;
  bool greeted_ = false;
  Proof expected_ = {};
};

// "set PERSIA_JOB_SECRET ...", the end of every refusal.
std::string CredentialsRemedy();
std::string TlsRemedy();

}  // namespace persia::net

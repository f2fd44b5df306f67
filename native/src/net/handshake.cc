#include "net/handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstring>
#include <string_view>
#include <vector>

namespace persia::net {
namespace {

constexpr std::string_view kServerLabel = "persia rpc 1 server";
constexpr std::string_view kClientLabel = "persia rpc 1 client";

// False where the system has no randomness to give.
bool Draw(Nonce* nonce) {
  return RAND_bytes(reinterpret_cast<unsigned char*>(nonce->data()), nonce->size()) == 1;
}

// The label tells the two proofs apart: neither can be sent back as the other. All parts but the
// label are of fixed length, and no label begins another.
StatusOr<Proof> Prove(const RoleKey& key, std::string_view label, const Hello& hello,
                      const Nonce& server, const ChannelBinding& binding) {
  std::vector<std::byte> text;
  const auto append = [&text](std::span<const std::byte> bytes) {
    text.insert(text.end(), bytes.begin(), bytes.end());
  };
  append(std::as_bytes(std::span(label)));
  append(std::as_bytes(std::span(&hello, 1)));
  append(server);
  append(binding);
  Proof proof = {};
  const auto* done = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                          reinterpret_cast<unsigned char*>(proof.data()), nullptr);
  // Zeros must never count as a proof.
  if (done == nullptr) return PermissionDenied("OpenSSL has no HMAC-SHA256 here");
  return proof;
}

bool SameProof(std::span<const std::byte> a, const Proof& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), b.size()) == 0;
}

}  // namespace

std::string CredentialsRemedy() {
  return "set PERSIA_JOB_SECRET or PERSIA_JOB_SECRET_FILE to the secret of this job, and "
         "PERSIA_JOB_NAME to its name, for both processes";
}

std::string TlsRemedy() {
  return "set PERSIA_TLS_DIR to the directory of the job's certificates, for both processes";
}

ClientHandshake::ClientHandshake(const Identity& identity, const ChannelBinding& binding)
    : key_(identity.key), binding_(binding) {
  hello_.role = identity.role;
  drawn_ = Draw(&hello_.nonce);
}

StatusOr<Proof> ClientHandshake::Answer(std::span<const std::byte> challenge) const {
  Challenge received;
  // Without a fresh nonce, an old challenge could be sent once more.
  if (!drawn_) return PermissionDenied("there are no random bytes for a nonce here");
  if (challenge.size() != sizeof(received)) {
    return PermissionDenied("its challenge has ", challenge.size(), " bytes instead of ",
                            sizeof(received));
  }
  std::memcpy(&received, challenge.data(), sizeof(received));
  PERSIA_ASSIGN_OR_RETURN(const Proof expected,
                          Prove(key_, kServerLabel, hello_, received.nonce, binding_));
  if (!SameProof(received.proof, expected)) {
    return PermissionDenied("its key for role '", RoleName(hello_.role),
                            "' is not the one of this process: it belongs to another job; ",
                            CredentialsRemedy());
  }
  return Prove(key_, kClientLabel, hello_, received.nonce, binding_);
}

StatusOr<Challenge> ServerHandshake::OnHello(const Identity& identity,
                                             std::span<const std::byte> bytes,
                                             const ChannelBinding& binding) {
  Hello hello;
  if (bytes.size() != sizeof(hello)) return PermissionDenied("the hello has another size");
  std::memcpy(&hello, bytes.data(), sizeof(hello));
  if (hello.version != Hello{}.version) {
    return PermissionDenied("handshake version ", hello.version,
                            " is not known here; this side speaks version 1");
  }
  role_ = hello.role;
  const auto found = identity.accepted.find(hello.role);
  if (found == identity.accepted.end()) {
    return PermissionDenied("role '", RoleName(hello.role),
                            "' may not connect to a process of role '", RoleName(identity.role),
                            "'");
  }
  Challenge challenge;
  if (!Draw(&challenge.nonce)) return Internal("no random bytes for a challenge");
  PERSIA_ASSIGN_OR_RETURN(challenge.proof,
                          Prove(found->second, kServerLabel, hello, challenge.nonce, binding));
  PERSIA_ASSIGN_OR_RETURN(expected_,
                          Prove(found->second, kClientLabel, hello, challenge.nonce, binding));
  greeted_ = true;
  return challenge;
}

Status ServerHandshake::OnProof(std::span<const std::byte> proof) const {
  if (greeted_ && SameProof(proof, expected_)) return Status::Ok();
  return PermissionDenied("the key of role '", RoleName(role_), "' is not the one of this job; ",
                          CredentialsRemedy());
}

}  // namespace persia::net

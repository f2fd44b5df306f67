// The messages of the handshake: no peer without the key gets through, whatever is sent.
//
// The first byte says how many of the rest are the first message; the others are the second.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "net/handshake.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia::net;  // NOLINT: a fuzz target is one function
  if (size == 0) return -1;
  Identity identity{.role = persia::Role::kServer};
  identity.key.fill(std::byte{7});
  for (uint8_t role = 1; role < 4; ++role) {
    identity.accepted[static_cast<persia::Role>(role)] = identity.key;
  }
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  const auto first = bytes.first(std::min<size_t>(data[0], bytes.size()));
  ServerHandshake server;
  const auto challenge = server.OnHello(identity, first, {});
  if (challenge.ok() != server.greeted()) std::abort();
  if (challenge.ok() && !identity.accepted.contains(server.role())) std::abort();
  if (server.OnProof(bytes.subspan(first.size())).ok()) std::abort();
  const ClientHandshake client(identity, {});
  if (client.Answer(bytes).ok()) std::abort();
  return 0;
}

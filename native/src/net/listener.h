// A socket that listens. Private to net/ and to the server of predictions, which speaks another
// protocol.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "net/poller.h"

namespace persia::net {

struct Listener {
  UniqueFd socket;  // does not block
  uint16_t port = 0;
};

// Port 0 takes a free one. kIOError names host and port.
StatusOr<Listener> Listen(const std::string& host, uint16_t port);
// On each address of `host` that this machine can use, with one port. At least one.
StatusOr<std::vector<Listener>> ListenOnAll(const std::string& host, uint16_t port);

// By the process's limit of descriptors. Leaves some for files and for connections of other planes.
uint32_t ConnectionsPermitted();
bool IsOutOfDescriptors(int error);
// Whether a client waits to be accepted: the kernel looks for a descriptor before it looks for a
// client.
bool HasWaiting(int listener);

}  // namespace persia::net

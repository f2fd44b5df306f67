// A socket that listens. Private to net/ and to the server of predictions, which speaks another
// protocol.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "net/poller.h"

namespace persia::net {

// Owned by the server that accepts from it. Closing the descriptor ends the listening; connections
// that were accepted are not affected.
struct Listener {
  UniqueFd socket;  // does not block
  uint16_t port = 0;
};

// Port 0 takes a free one. kIOError names host and port.
// Both block on the resolver of the system: call them before a server begins to serve.
StatusOr<Listener> Listen(const std::string& host, uint16_t port);
// On each address of `host` that this machine can use, with one port. At least one.
// For names with an IPv4 and an IPv6 address, such as localhost: clients try either first.
// Addresses of a family that the machine lacks are left out; any other failure is reported, as a
// server that listens on half of its addresses would seem to work.
StatusOr<std::vector<Listener>> ListenOnAll(const std::string& host, uint16_t port);

// By the process's limit of descriptors. Leaves some for files and for connections of other planes.
// A server that accepted until the limit could open no checkpoint any more, nor accept a connection
// to refuse it.
uint32_t ConnectionsPermitted();
// Of errno after accept(): the process or the system has none left. The server then closes idle
// connections, and waits instead of accepting in a loop.
bool IsOutOfDescriptors(int error);
// Whether a client waits to be accepted: the kernel looks for a descriptor before it looks for a
// client.
bool HasWaiting(int listener);

}  // namespace persia::net

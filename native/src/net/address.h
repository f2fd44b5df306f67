// "host:port" as people and discovery write it. Private to net/.
#pragma once

#include <string>

#include "base/status.h"

namespace persia::net {

struct Address {
  std::string host;  // a name, an IPv4 address, or an IPv6 address without its brackets
  uint16_t port = 0;
};

// kInvalidArgument names what is wrong. "[::1]:8887" is how IPv6 is written.
StatusOr<Address> ParseAddress(const std::string& text);

}  // namespace persia::net

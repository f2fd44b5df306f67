#include "net/address.h"

#include <charconv>

namespace persia::net {

StatusOr<Address> ParseAddress(const std::string& text) {
  const auto refuse = [&text](const char* why) {
    return InvalidArgument("address '" + text + "' " + why + "; write host:port");
  };
  // The last colon: an IPv6 address has colons of its own.
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return refuse("has no host or no port");
  Address address;
  const char* begin = text.data() + colon + 1;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, address.port);
  if (error != std::errc() || stop != end || address.port == 0) {
    return refuse("has a port that is not 1 to 65535");
  }
  address.host = text.substr(0, colon);
  if (address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  if (address.host.empty()) return refuse("has no host");
  return address;
}

}  // namespace persia::net

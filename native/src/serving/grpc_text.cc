#include "serving/grpc_text.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

namespace persia::serving {

std::string PercentEncoded(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string encoded;
  encoded.reserve(text.size());
  for (const char c : text) {
    if (c >= ' ' && c <= '~' && c != '%') {
      encoded.push_back(c);
    } else {
      const auto byte = static_cast<uint8_t>(c);
      encoded += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return encoded;
}

std::optional<std::chrono::nanoseconds> ReadTimeout(std::string_view text) {
  if (text.size() < 2 || text.size() > 9) return std::nullopt;
  uint64_t count = 0;
  const char* end = text.data() + text.size() - 1;
  const auto [last, error] = std::from_chars(text.data(), end, count);
  if (error != std::errc() || last != end) return std::nullopt;
  // So that no product exceeds 64 bits.
  constexpr uint64_t kMaxHours = 24 * 365;
  switch (*end) {
    case 'n': return std::chrono::nanoseconds(count);
    case 'u': return std::chrono::microseconds(count);
    case 'm': return std::chrono::milliseconds(count);
    case 'S': return std::chrono::seconds(count);
    case 'M': return std::chrono::minutes(std::min(count, 60 * kMaxHours));
    case 'H': return std::chrono::hours(std::min(count, kMaxHours));
    default: return std::nullopt;
  }
}

}  // namespace persia::serving

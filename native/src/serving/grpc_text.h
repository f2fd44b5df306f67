// Header fields of gRPC. Private to serving/.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace persia::serving {

// Header fields are ASCII: the others, and the escape itself, as %XX.
std::string PercentEncoded(std::string_view text);

// "200m" is 200 ms: at most eight digits and a unit. None: it is no such text.
std::optional<std::chrono::nanoseconds> ReadTimeout(std::string_view text);

}  // namespace persia::serving

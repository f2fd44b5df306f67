#include "base/status.h"

#include <array>

namespace persia {

// By number. A code of a newer peer has no name here, and must not crash its reader.
std::string_view StatusCodeName(StatusCode code) {
  static constexpr std::array<std::string_view, 11> kNames = {
      "Ok",          "InvalidArgument",    "NotFound",          "Corruption",
      "Unavailable", "DeadlineExceeded",   "ResourceExhausted", "IOError",
      "Internal",    "FailedPrecondition", "PermissionDenied"};
  const auto number = static_cast<size_t>(code);
  return number < kNames.size() ? kNames[number] : "Unknown";
}

std::string Status::ToString() const {
  if (ok()) return "Ok";
  std::string text(StatusCodeName(code_));
  text += ": ";
  text += message_;
  return text;
}

}  // namespace persia

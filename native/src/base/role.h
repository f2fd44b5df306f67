// Role: what a process of a job is, and RoleSet: the roles that may call a method.
//
// A process proves its role when it connects (net/handshake.h). Servers compare it with the
// method's RoleSet before they read the request's body.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace persia {

// The numbers are on the wire: they never change.
enum class Role : uint8_t {
  kNone = 0,  // unproven: a process without an identity
  kTrainer = 1,
  kLoader = 2,
  kWorker = 3,  // embedding worker
  kServer = 4,  // parameter server
  kInference = 5,
  kMonitor = 6,  // status and metrics: reads only
  kAdmin = 7,
};

// By number. Python sets a process's identity by these names (bindings/security.cc), and derives
// keys from them: another name would be another key, which peers of earlier versions do not accept.
inline constexpr std::array<std::string_view, 8> kRoleNames = {
    "none", "trainer", "loader", "worker", "server", "inference", "monitor", "admin"};

// A number of the wire may be of a newer peer: "unknown".
constexpr std::string_view RoleName(Role role) {
  const auto number = static_cast<size_t>(role);
  return number < kRoleNames.size() ? kRoleNames[number] : "unknown";
}

// None for any other text, and for "none".
// For names that a user or Python gives. "none" is refused because it is the absence of a proof: a
// process that could choose it would ask for less than it was given.
constexpr std::optional<Role> ParseRole(std::string_view name) {
  for (size_t number = 1; number < kRoleNames.size(); ++number) {
    if (kRoleNames[number] == name) return static_cast<Role>(number);
  }
  return std::nullopt;
}

// Empty by default: a method that names no callers may be called by no authenticated process.
// A set in one word, so that tables of methods are constants and the check costs one test of a bit
// for each request. Methods forgotten by their author are closed, not open.
class RoleSet {
 public:
  constexpr RoleSet() = default;
  constexpr RoleSet(std::initializer_list<Role> roles) {
    for (const Role role : roles) bits_ |= Bit(role);
  }
  constexpr bool Contains(Role role) const { return (bits_ & Bit(role)) != 0; }
  // "trainer or admin", for messages.
  // Which roles would be accepted is no secret: a refused user needs it to find the right one.
  std::string ToString() const {
    std::string text;
    for (size_t number = 1; number < kRoleNames.size(); ++number) {
      if (!Contains(static_cast<Role>(number))) continue;
      if (!text.empty()) text += " or ";
      text += kRoleNames[number];
    }
    return text.empty() ? "no role" : text;
  }

 private:
  // Masked, as the number may be a newer peer's: a shift by 32 or more is undefined. Such a role is
  // in no key table, so it never gets this far with a proof.
  static constexpr uint32_t Bit(Role role) { return 1u << (static_cast<uint32_t>(role) & 31); }
  uint32_t bits_ = 0;
};

}  // namespace persia

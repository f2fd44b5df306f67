// Status and StatusOr<T>: how every fallible function of the native code reports failure.
//
// The codes are few on purpose: a caller decides by code (retry, refuse, give up) and a person
// reads the message, which names the field, the value and the remedy. Our code does not throw;
// bindings/errors.cc is the single place where a Status becomes a Python exception.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace persia {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument = 1,     // the caller's fault: a bad value, a bad shape, an unknown name
  kNotFound = 2,            // the thing asked for does not exist (an expired reference, say)
  kCorruption = 3,          // bytes from the network or the disk that do not decode
  kUnavailable = 4,         // the peer cannot be reached or is stopping; retrying may help
  kDeadlineExceeded = 5,    // the time given ran out
  kResourceExhausted = 6,   // a bounded buffer is full; retry later
  kIOError = 7,             // the operating system refused
  kInternal = 8,            // a bug of ours
  kFailedPrecondition = 9,  // not configured yet, or configured differently
};

// The code's name as users see it, for instance "InvalidArgument".
std::string_view StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return Status(); }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "InvalidArgument: slot 'age': ..." or "Ok".
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) {
  return {StatusCode::kInvalidArgument, std::move(m)};
}
inline Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status Corruption(std::string m) { return {StatusCode::kCorruption, std::move(m)}; }
inline Status Unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
inline Status DeadlineExceeded(std::string m) {
  return {StatusCode::kDeadlineExceeded, std::move(m)};
}
inline Status ResourceExhausted(std::string m) {
  return {StatusCode::kResourceExhausted, std::move(m)};
}
inline Status IOError(std::string m) { return {StatusCode::kIOError, std::move(m)}; }
inline Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }
inline Status FailedPrecondition(std::string m) {
  return {StatusCode::kFailedPrecondition, std::move(m)};
}

// A value, or the reason why there is none. Reading value() of a failed one is a programmer's bug.
template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : state_(std::move(value)) {}         // NOLINT: implicit by design
  StatusOr(Status status) : state_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status::Ok() : std::get<Status>(state_); }
  StatusCode code() const { return ok() ? StatusCode::kOk : std::get<Status>(state_).code(); }
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  T* operator->() { return &std::get<T>(state_); }
  T& operator*() & { return std::get<T>(state_); }

 private:
  std::variant<Status, T> state_;
};

#define PERSIA_RETURN_IF_ERROR(expression)                                    \
  do {                                                                        \
    if (::persia::Status persia_status_ = (expression); !persia_status_.ok()) \
      return persia_status_;                                                  \
  } while (false)

#define PERSIA_ASSIGN_OR_RETURN(declaration, ...) \
  PERSIA_ASSIGN_OR_RETURN_(PERSIA_JOIN_(persia_result_, __LINE__), declaration, __VA_ARGS__)
#define PERSIA_ASSIGN_OR_RETURN_(result, declaration, ...) \
  auto result = (__VA_ARGS__);                             \
  if (!result.ok()) return result.status();                \
  declaration = std::move(result).value()
#define PERSIA_JOIN_(a, b) PERSIA_JOIN_AGAIN_(a, b)
#define PERSIA_JOIN_AGAIN_(a, b) a##b

}  // namespace persia

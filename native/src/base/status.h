// Status and StatusOr<T>: how every fallible function of the native code reports failure.
//
// The codes are few on purpose: a caller decides by code (retry, refuse, give up) and a person
// reads the message, which names the field, the value and the remedy. Our code does not throw;
// bindings/errors.cc is the single place where a Status becomes a Python exception.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace persia {

// The numbers are on the wire, as the status of a reply: they never change, and a receiver treats
// one that it does not know as kInternal.
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
  kPermissionDenied = 10,   // the caller has not proved who it is, or its role may not do this
};

// The code's name as users see it, for instance "InvalidArgument".
std::string_view StatusCodeName(StatusCode code);

// A code and a message. Cheap where it is Ok: no memory is taken. Movable and copyable, and
// thread-compatible like a string.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  // For functions whose other paths return failures: it says at a glance that this one succeeded.
  static Status Ok() { return Status(); }

  bool ok() const { return code_ == StatusCode::kOk; }
  // For the common question of which failure it is, without a copy of the message.
  StatusCode code() const { return code_; }
  // Written for the person who will read it: it names what happened, the value that caused it and
  // what to do. It carries no stack and no code.
  const std::string& message() const { return message_; }
  // "InvalidArgument: slot 'age': ..." or "Ok".
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// One text of parts that are texts or numbers.
std::string Concat(const auto&... parts) {
  std::string text;
  const auto add = [&text]<typename T>(const T& part) {
    if constexpr (std::is_arithmetic_v<T>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  return text;
}

// One maker for each code, of the parts of the message. A message begins with the field or the
// object that it is about, in lower case, and has no full stop.
Status InvalidArgument(const auto&... parts) {
  return {StatusCode::kInvalidArgument, Concat(parts...)};
}
// What was named is not here, and asking again will not help: a batch that has ended, a row that
// was evicted.
Status NotFound(const auto&... parts) { return {StatusCode::kNotFound, Concat(parts...)}; }
// Never retried: the same bytes will not decode the next time.
Status Corruption(const auto&... parts) { return {StatusCode::kCorruption, Concat(parts...)}; }
// A channel repeats calls that fail so, until their deadline: a handler that returns it promises
// that repeating the call is safe.
Status Unavailable(const auto&... parts) { return {StatusCode::kUnavailable, Concat(parts...)}; }
// Nothing is known of the outcome: the peer may have done what was asked. Callers repeat by key.
Status DeadlineExceeded(const auto&... parts) {
  return {StatusCode::kDeadlineExceeded, Concat(parts...)};
}
// Something bounded is full now and will have room later: the caller's answer is to wait, which is
// the back-pressure of registrations.
Status ResourceExhausted(const auto&... parts) {
  return {StatusCode::kResourceExhausted, Concat(parts...)};
}
// The message has the system's own text for errno.
Status IOError(const auto&... parts) { return {StatusCode::kIOError, Concat(parts...)}; }
// Reported as a bug: what it says is for us, not for the user to mend.
Status Internal(const auto&... parts) { return {StatusCode::kInternal, Concat(parts...)}; }
// The state of the server is not the one that the call needs. An embedding worker answers it by
// configuring the server, and repeats its call once.
Status FailedPrecondition(const auto&... parts) {
  return {StatusCode::kFailedPrecondition, Concat(parts...)};
}

// Never retried: credentials do not mend themselves. The message says which are missing.
Status PermissionDenied(const auto&... parts) {
  return {StatusCode::kPermissionDenied, Concat(parts...)};
}

// A value, or the reason why there is none. Reading value() of a failed one is a programmer's bug.
// Both constructors are implicit, so that a function returns a value or a failure without naming
// this class. A StatusOr made of Status::Ok() would have neither: no function of ours does that.
// Movable where T is; it may hold what cannot be copied.
template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : state_(std::move(value)) {}         // NOLINT: implicit by design
  StatusOr(Status status) : state_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return std::holds_alternative<T>(state_); }
  // A copy, so it outlives the object. Ok where there is a value.
  Status status() const { return ok() ? Status::Ok() : std::get<Status>(state_); }
  StatusCode code() const { return ok() ? StatusCode::kOk : std::get<Status>(state_).code(); }
  // Throws std::bad_variant_access on a failure: a bug of the caller, who must have asked ok().
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  // Like value(), these read a value that must be there.
  T* operator->() { return &std::get<T>(state_); }
  T& operator*() & { return std::get<T>(state_); }

 private:
  std::variant<Status, T> state_;
};

// Returns the failure from the function that it stands in, whose result may be a Status or any
// StatusOr. The expression is evaluated once.
#define PERSIA_RETURN_IF_ERROR(expression)                                    \
  do {                                                                        \
    if (::persia::Status persia_status_ = (expression); !persia_status_.ok()) \
      return persia_status_;                                                  \
  } while (false)

// PERSIA_ASSIGN_OR_RETURN(auto row, Find(sign)): declares `row` with the value of Find(), or
// returns its failure from the function. It is several statements, so an `if` in front of it needs
// braces.
#define PERSIA_ASSIGN_OR_RETURN(declaration, ...) \
  PERSIA_ASSIGN_OR_RETURN_(PERSIA_JOIN_(persia_result_, __LINE__), declaration, __VA_ARGS__)
// The result gets a name of its line, so that two of them may stand in one block.
#define PERSIA_ASSIGN_OR_RETURN_(result, declaration, ...) \
  auto result = (__VA_ARGS__);                             \
  if (!result.ok()) return result.status();                \
  declaration = std::move(result).value()
#define PERSIA_JOIN_(a, b) PERSIA_JOIN_AGAIN_(a, b)
#define PERSIA_JOIN_AGAIN_(a, b) a##b

}  // namespace persia

#include "bindings/errors.h"

#include <algorithm>

namespace persia::bindings {
namespace {

namespace py = pybind11;

const char* ErrorClass(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidArgument: return "InvalidArgumentError";
    case StatusCode::kNotFound: return "NotFoundError";
    case StatusCode::kCorruption: return "CorruptionError";
    case StatusCode::kUnavailable: return "UnavailableError";
    case StatusCode::kDeadlineExceeded: return "DeadlineExceededError";
    case StatusCode::kResourceExhausted: return "ResourceExhaustedError";
    case StatusCode::kIOError: return "StorageError";
    case StatusCode::kPermissionDenied: return "PermissionDeniedError";
    case StatusCode::kFailedPrecondition: return "FailedPreconditionError";
    case StatusCode::kInternal:
    case StatusCode::kOk: break;
  }
  return "InternalError";  // also a code that a newer peer sent
}

// The classes live in Python, where users import them; looking one up costs nothing beside raising
// it. Bytes of a peer's message that are not UTF-8 are replaced: an error must not hide behind a
// UnicodeDecodeError.
[[noreturn]] void Raise(const char* error_class, const std::string& message) {
  const py::object type = py::module_::import("persia.errors").attr(error_class);
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
  // Without text decoding has failed, and has set an error of its own.
  if (text) PyErr_SetObject(type.ptr(), text.ptr());
  throw py::error_already_set();
}

}  // namespace

void RaiseIfError(const Status& status) {
  if (!status.ok()) Raise(ErrorClass(status.code()), status.message());
}

void RaiseTypeError(const std::string& message) { Raise("InvalidTypeError", message); }

std::chrono::milliseconds Timeout(double timeout_s) {
  // A limit that keeps now() + timeout inside the clock's range.
  constexpr double kTenYearsS = 10 * 365 * 86400.0;
  if (!(timeout_s >= 0)) {
    RaiseIfError(
        InvalidArgument("timeout_s: ", timeout_s, " is not a duration; give seconds, 0 or more"));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(std::min(timeout_s, kTenYearsS) * 1000.0));
}

}  // namespace persia::bindings

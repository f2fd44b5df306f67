// From Status to the exceptions of persia.errors, and the guards that every bound function uses.
//
// pybind11 reports errors by C++ exceptions; they are
// thrown here and nowhere else, with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <string>
#include <utility>

#include "base/status.h"

namespace persia::bindings {

// Raises the class of persia.errors that belongs to the code; does nothing when Ok.
void RaiseIfError(const Status& status);

// Raises persia.errors.InvalidTypeError, for which there is no code: types end at this boundary.
[[noreturn]] void RaiseTypeError(const std::string& message);

template <typename T>
T ValueOrRaise(StatusOr<T> result) {
  RaiseIfError(result.status());
  return std::move(result).value();
}

// The GIL is free from here to the end of the block. A daemon thread that wants it back when the
// interpreter has ended waits until the process has, too: CPython (before 3.14) would unwind the
// thread's stack, and that ends the process with SIGABRT at the first destructor that is noexcept,
// as that of pybind11::gil_scoped_release is.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// Runs `function` without the GIL. It must not touch a Python object.
template <typename Function>
auto WithoutGil(Function&& function) {
  const GilReleased released;
  return function();
}

// Both raise InvalidArgumentError for a negative number or
// NaN. Whatever is longer than ten years counts as that.
std::chrono::milliseconds Timeout(double timeout_s);
std::chrono::steady_clock::time_point DeadlineAfter(double timeout_s);

}  // namespace persia::bindings

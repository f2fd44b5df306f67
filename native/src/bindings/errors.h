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

// Runs `function` without the GIL. It must not touch a Python object.
template <typename Function>
auto WithoutGil(Function&& function) {
  pybind11::gil_scoped_release release;
  return function();
}

// Both raise InvalidArgumentError for a negative number or
// NaN. Whatever is longer than ten years counts as that.
std::chrono::milliseconds Timeout(double timeout_s);
std::chrono::steady_clock::time_point DeadlineAfter(double timeout_s);

}  // namespace persia::bindings

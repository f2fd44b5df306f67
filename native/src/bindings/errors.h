// From Status to the exceptions of persia.errors, and the guards that every bound function uses.
//
// pybind11 reports errors by C++ exceptions; they are
// thrown here and nowhere else, with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <string>
#include <type_traits>
#include <utility>

#include "base/status.h"
#include "bindings/gil.h"

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
  const GilReleased released;
  return function();
}

// Raises InvalidArgumentError for a negative number or NaN. Whatever is longer than ten years
// counts as that.
std::chrono::milliseconds Timeout(double timeout_s);

// What a method returns, as Python gets it: a failure is raised, a value is passed on.
inline void ToPython(const Status& status) { RaiseIfError(status); }
template <typename T>
T ToPython(StatusOr<T> result) {
  return ValueOrRaise(std::move(result));
}
template <typename T>
T ToPython(T value) {
  return value;
}

// A method as a function to bind: it runs without the GIL, so its arguments must be no Python
// objects. A parameter that is a deadline is `timeout_s` in Python, seconds from now on.
template <typename Result, typename Class, typename... Args>
auto Blocking(Result (Class::*method)(Args...)) {
  return [method](Class& self, Args... args) {
    const auto call = [&] { return (self.*method)(std::forward<Args>(args)...); };
    if constexpr (std::is_void_v<Result>) {
      WithoutGil(call);
    } else {
      return ToPython(WithoutGil(call));
    }
  };
}
template <typename Result, typename Class, typename... Args>
auto Blocking(Result (Class::*method)(Args...) const) {
  return [method](const Class& self, Args... args) {
    return ToPython(WithoutGil([&] { return (self.*method)(std::forward<Args>(args)...); }));
  };
}

}  // namespace persia::bindings

namespace pybind11::detail {

// Seconds, as a float: how long a call may take, and until when.
template <>
class type_caster<std::chrono::milliseconds> {
 public:
  PYBIND11_TYPE_CASTER(std::chrono::milliseconds, const_name("float"));
  bool load(handle source, bool convert) {
    make_caster<double> seconds;
    if (!seconds.load(source, convert)) return false;
    value = persia::bindings::Timeout(cast_op<double>(seconds));
    return true;
  }
};
template <>
class type_caster<std::chrono::steady_clock::time_point> {
 public:
  PYBIND11_TYPE_CASTER(std::chrono::steady_clock::time_point, const_name("float"));
  bool load(handle source, bool convert) {
    make_caster<std::chrono::milliseconds> timeout;
    if (!timeout.load(source, convert)) return false;
    value = std::chrono::steady_clock::now() + cast_op<std::chrono::milliseconds>(timeout);
    return true;
  }
};

}  // namespace pybind11::detail

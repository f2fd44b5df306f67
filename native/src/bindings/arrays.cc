#include "bindings/arrays.h"

#include <cstring>
#include <limits>

#include "base/status.h"
#include "bindings/errors.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

template <typename T>
std::string DtypeName() {
  return py::str(py::dtype::of<T>()).cast<std::string>();
}

// What the caller gave, for the message: "an array of float64", "a list".
// For the message alone; it may run Python code, so no view of an array is open meanwhile.
std::string Describe(py::handle object) {
  if (py::isinstance<py::array>(object)) {
    return "an array of " + py::str(object.attr("dtype")).cast<std::string>();
  }
  return "a " + py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

// Never converts: a silent copy of a large array would cost more than the call, and hide the
// mistake.
template <typename T>
py::array CheckedArray(py::handle object, const std::string& argument, int ndim) {
  if (!py::array_t<T>::check_(object)) {
    RaiseTypeError(argument + ": expected a numpy array of " + DtypeName<T>() + ", found " +
                   Describe(object) + "; convert it with numpy.ascontiguousarray(x, dtype=numpy." +
                   DtypeName<T>() + ")");
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (array.ndim() != ndim) {
    RaiseIfError(
        InvalidArgument(argument, ": expected ", ndim, " dimension(s), found ", array.ndim()));
  }
  // Aligned as well: the engine reads the elements as T.
  constexpr int kNeeded = int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_};
  if ((array.flags() & kNeeded) != kNeeded) {
    RaiseTypeError(argument +
                   ": the array is not C-contiguous and aligned; pass numpy.ascontiguousarray(x)");
  }
  return array;
}

}  // namespace

template <typename T>
ArrayArgument<T>::ArrayArgument(py::handle object, const std::string& argument, int ndim)
    : argument_(argument), array_(CheckedArray<T>(object, argument, ndim)) {}

template <typename T>
uint32_t ArrayArgument<T>::shape(int axis) const {
  const py::ssize_t size = array_.shape(axis);
  if (size > std::numeric_limits<uint32_t>::max()) {
    RaiseIfError(
        InvalidArgument(argument_, ": a dimension of ", size, " is too large; at most 2^32 - 1"));
  }
  return static_cast<uint32_t>(size);
}

template class ArrayArgument<uint64_t>;
template class ArrayArgument<uint32_t>;
template class ArrayArgument<int64_t>;
template class ArrayArgument<float>;

BytesArgument::BytesArgument(const py::buffer& object, const std::string& argument)
    : info_(object.request()) {
  // Decoders take the bytes as they follow one another in memory.
  if (PyBuffer_IsContiguous(info_.view(), 'C') == 0) {
    RaiseTypeError(argument + ": the buffer is not contiguous; pass bytes(x)");
  }
  const auto size = static_cast<size_t>(info_.size * info_.itemsize);
  bytes_ = {static_cast<const std::byte*>(info_.ptr), size};
  if (reinterpret_cast<uintptr_t>(info_.ptr) % 8 != 0) {
    aligned_ = Buffer(size);
    std::memcpy(aligned_.data(), bytes_.data(), size);
    bytes_ = aligned_.span();
  }
}

}  // namespace persia::bindings

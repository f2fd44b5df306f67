// How memory crosses between Python and the engine: checked views in, views with an owner out,
// never a copy of rows.
//
// The input views keep a reference to the Python object, so that they stay valid while the GIL is
// released even when another thread drops or edits the list it came from. Create and destroy them
// with the GIL held.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"

namespace persia::bindings {

// A C-contiguous, aligned array of T with `ndim` dimensions.
// Raises InvalidTypeError naming `argument` and what was
// found; ValueError for a wrong number of dimensions.
template <typename T>
class ArrayArgument {
 public:
  ArrayArgument(pybind11::handle object, const std::string& argument, int ndim);

  std::span<const T> values() const {
    return {static_cast<const T*>(array_.data()), static_cast<size_t>(array_.size())};
  }
  const T* data() const { return values().data(); }
  // Raises InvalidArgumentError when it needs more than the 32 bits that the engine gives it.
  uint32_t shape(int axis) const;

 private:
  std::string argument_;
  pybind11::array array_;
};

extern template class ArrayArgument<uint64_t>;
extern template class ArrayArgument<uint32_t>;
extern template class ArrayArgument<int64_t>;
extern template class ArrayArgument<float>;

// The bytes of any contiguous buffer (bytes, bytearray, memoryview, array), starting at a multiple
// of 8 as decoders need it: where they lie when they are aligned, as those of `bytes` always are,
// otherwise copied.
class BytesArgument {
 public:
  BytesArgument(const pybind11::buffer& object, const std::string& argument);

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  pybind11::buffer_info info_;
  Buffer aligned_;
  std::span<const std::byte> bytes_;
};

// A writable array over memory that `owner` keeps alive.
template <typename T>
pybind11::array_t<T> ViewOf(const T* data, std::vector<pybind11::ssize_t> shape,
                            pybind11::handle owner) {
  // Empty arrays get memory of their own: numpy takes a null pointer as a request for it.
  return pybind11::array_t<T>(std::move(shape), data, owner);
}

// An owner for arrays over the memory of `value`, which it takes over. That memory must not move
// with the object: that of a vector or a Buffer does not.
template <typename T>
pybind11::capsule OwnerOf(T value) {
  auto owned = std::make_unique<T>(std::move(value));
  pybind11::capsule owner(owned.get(), [](void* object) { delete static_cast<T*>(object); });
  owned.release();  // the capsule deletes it from here on
  return owner;
}

// A 1-D array that takes over the vector's memory.
template <typename T>
pybind11::array_t<T> ArrayFrom(std::vector<T> values) {
  const T* data = values.data();
  const auto size = static_cast<pybind11::ssize_t>(values.size());
  return ViewOf<T>(data, {size}, OwnerOf(std::move(values)));
}

}  // namespace persia::bindings

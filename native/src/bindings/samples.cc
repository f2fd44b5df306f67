// A loader's samples are many small Python objects (thousands in a batch), so this is the one place
// that walks them in C++. The GIL is kept: the objects belong to the caller.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/click_lines.h"
#include "base/string_hash.h"
#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

template <typename T>
using Flattened = std::pair<py::array_t<T>, py::array_t<uint32_t>>;  // values, offsets

std::string NameOfClass(py::handle object) {
  return py::type::handle_of(object).attr("__name__").cast<std::string>();
}

// Values of a feature's samples, one sample after the other.
template <typename T>
class Flattener {
 public:
  Flattener(std::string what, size_t num_samples) : what_(std::move(what)) {
    values_.reserve(num_samples);
    offsets_.reserve(num_samples + 1);
    offsets_.push_back(0);
  }

  void Append(T value) { values_.push_back(value); }
  // 1-D, of T, with any stride.
  void Append(const py::array& sample) {
    const auto* bytes = static_cast<const std::byte*>(sample.data());
    const auto size = static_cast<size_t>(sample.size());
    const size_t begin = values_.size();
    values_.resize(begin + size);
    if (size == 0) return;
    if (sample.strides(0) == sizeof(T)) {
      std::memcpy(values_.data() + begin, bytes, size * sizeof(T));
      return;
    }
    for (size_t i = 0; i < size; ++i) {
      std::memcpy(values_.data() + begin + i, bytes + static_cast<ptrdiff_t>(i) * sample.strides(0),
                  sizeof(T));
    }
  }
  // Checked once a sample: its IDs are appended before, and the offsets have 32 bits.
  void EndSample() {
    if (values_.size() > std::numeric_limits<uint32_t>::max()) {
      RaiseIfError(InvalidArgument(what_, ": more than 2^32 - 1 IDs; send smaller batches"));
    }
    offsets_.push_back(static_cast<uint32_t>(values_.size()));
  }
  // The sample that is being appended, for a message.
  std::string Where() const {
    return what_ + ", sample " + std::to_string(offsets_.size() - 1) + ": ";
  }
  Flattened<T> Release() { return {ArrayFrom(std::move(values_)), ArrayFrom(std::move(offsets_))}; }

 private:
  const std::string what_;
  std::vector<T> values_;
  std::vector<uint32_t> offsets_;
};

// Most samples have the very dtype object that numpy hands out for T, or one equal to it.
template <typename T>
void CheckSample(py::handle sample, const py::dtype& dtype, const Flattener<T>& flat) {
  const auto name = [&] { return py::str(dtype).template cast<std::string>(); };
  if (!py::isinstance<py::array>(sample)) {
    RaiseTypeError(flat.Where() + "expected a 1-D numpy array of " + name() + ", found " +
                   NameOfClass(sample) + "; make it one with numpy.array(x, dtype=numpy." + name() +
                   ")");
  }
  const auto array = py::reinterpret_borrow<py::array>(sample);
  // Signed IDs are taken by their bits, as hashes have them and as `IDTypeFeature.from_csr` does.
  const auto is_signed_id = [&] {
    return std::is_same_v<T, uint64_t> && py::array_t<int64_t>::check_(sample);
  };
  if (!array.dtype().is(dtype) && !py::array_t<T>::check_(sample) && !is_signed_id()) {
    RaiseTypeError(flat.Where() + "expected dtype " + name() + ", found " +
                   py::str(sample.attr("dtype")).cast<std::string>() +
                   "; convert it with .astype(numpy." + name() + ")");
  }
  if (array.ndim() != 1) {
    RaiseIfError(
        InvalidArgument(flat.Where(), "expected a 1-D array, found ", array.ndim(), " dimensions"));
  }
}

template <typename T>
Flattened<T> FlattenArrays(const std::string& what, const py::sequence& samples) {
  // A list or tuple of its own: the caller's may change while an error message runs Python code.
  const py::tuple fixed(samples);
  const auto dtype = py::dtype::of<T>();
  Flattener<T> flat(what, fixed.size());
  for (const py::handle sample : fixed) {
    CheckSample(sample, dtype, flat);
    flat.Append(py::reinterpret_borrow<py::array>(sample));
    flat.EndSample();
  }
  return flat.Release();
}

Flattened<uint64_t> FlattenSamples(const std::string& name, const py::sequence& samples) {
  return FlattenArrays<uint64_t>("feature '" + name + "'", samples);
}

Flattened<float> FlattenWeights(const std::string& name, const py::sequence& samples) {
  return FlattenArrays<float>("weights of feature '" + name + "'", samples);
}

// bytes are hashed as they are, a str as its UTF-8: equal text gives equal IDs.
bool IsString(py::handle object) {
  return PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr());
}

// A view into a str (as UTF-8) or bytes object.
std::string_view BytesOf(py::handle string) {
  Py_ssize_t size = 0;
  if (PyBytes_Check(string.ptr())) {
    char* bytes = nullptr;
    PyBytes_AsStringAndSize(string.ptr(), &bytes, &size);
    return {bytes, static_cast<size_t>(size)};
  }
  const char* utf8 = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
  if (utf8 == nullptr) {  // a lone surrogate
    PyErr_Clear();
    RaiseIfError(InvalidArgument("a string cannot be encoded as UTF-8: ",
                                 py::repr(string).cast<std::string>()));
  }
  return {utf8, static_cast<size_t>(size)};
}

// A sample is a string, None for no ID, or a sequence of strings.
// Hashing is part of the walk, so that no string is copied.
Flattened<uint64_t> FlattenStrings(const std::string& name, const py::sequence& samples) {
  const py::tuple fixed(samples);
  Flattener<uint64_t> flat("feature '" + name + "'", fixed.size());
  const auto append = [&](py::handle string) {
    if (!IsString(string)) {
      RaiseTypeError(flat.Where() + "expected strings, found " + NameOfClass(string));
    }
    flat.Append(StringHash(BytesOf(string)));
  };
  for (const py::handle sample : fixed) {
    if (IsString(sample)) {
      append(sample);
    } else if (!sample.is_none()) {
      if (!PySequence_Check(sample.ptr())) {
        RaiseTypeError(flat.Where() + "expected a string, None or a list of strings, found " +
                       NameOfClass(sample));
      }
      for (const py::handle string : py::tuple(py::reinterpret_borrow<py::sequence>(sample))) {
        append(string);
      }
    }
    flat.EndSample();
  }
  return flat.Release();
}

// For Arrow columns: no Python object is touched, so the GIL is free.
py::array_t<uint64_t> HashStringBuffer(py::handle offsets, const py::buffer& data) {
  const ArrayArgument<int64_t> offset_array(offsets, "offsets", 1);
  const BytesArgument bytes(data, "data");
  const size_t size = offset_array.values().size();
  std::vector<uint64_t> ids(size == 0 ? 0 : size - 1);
  RaiseIfError(
      WithoutGil([&] { return HashStrings(offset_array.values(), bytes.bytes(), ids.data()); }));
  return ArrayFrom(std::move(ids));
}

// (labels, numbers[num_numbers, n], ids[num_categories, n], lines, bad ones, [(line, reason), ...])
py::tuple ParseClicks(const py::buffer& text, uint32_t num_numbers, uint32_t num_categories) {
  const BytesArgument bytes(text, "text");
  const std::string_view chars(reinterpret_cast<const char*>(bytes.bytes().data()),
                               bytes.bytes().size());
  ClickLines lines =
      WithoutGil([&] { return ParseClickLines(chars, num_numbers, num_categories); });
  py::list bad;
  for (const ClickLines::Bad& one : lines.bad) bad.append(py::make_tuple(one.line, one.reason));
  const auto size = static_cast<py::ssize_t>(lines.labels.size());
  return py::make_tuple(
      ArrayFrom(std::move(lines.labels)),
      ArrayFrom(std::move(lines.numbers)).reshape({py::ssize_t{num_numbers}, size}),
      ArrayFrom(std::move(lines.ids)).reshape({py::ssize_t{num_categories}, size}), lines.num_lines,
      lines.num_bad, bad);
}

}  // namespace

void BindSamples(py::module_& module) {
  module.def("flatten_samples", &FlattenSamples, py::arg("name"), py::arg("samples"));
  module.def("flatten_weights", &FlattenWeights, py::arg("name"), py::arg("samples"));
  module.def("flatten_strings", &FlattenStrings, py::arg("name"), py::arg("samples"));
  module.def("parse_clicks", &ParseClicks, py::arg("text"), py::arg("num_numbers"),
             py::arg("num_categories"));
  module.def("hash_string_buffer", &HashStringBuffer, py::arg("offsets"), py::arg("data"));
}

}  // namespace persia::bindings

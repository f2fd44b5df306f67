#include "base/id_features.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

// (name, ids, offsets)
using FeatureTuple = std::tuple<std::string, py::object, py::object>;

py::bytes Encode(uint32_t batch_size, const std::vector<FeatureTuple>& features) {
  std::vector<ArrayArgument<uint64_t>> ids;
  std::vector<ArrayArgument<uint32_t>> offsets;
  IdFeatures batch{.batch_size = batch_size, .features = {}};
  for (const auto& [name, id_array, offset_array] : features) {
    const auto& feature_ids = ids.emplace_back(id_array, "feature '" + name + "': ids", 1);
    const auto& feature_offsets =
        offsets.emplace_back(offset_array, "feature '" + name + "': offsets", 1);
    batch.features.push_back({name, feature_offsets.values(), feature_ids.values()});
  }
  const auto message = ValueOrRaise(WithoutGil([&] { return EncodeIdFeatures(batch); }));
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

uint32_t Check(const py::buffer& message) {
  const BytesArgument argument(message, "message");
  return ValueOrRaise(WithoutGil([&] { return DecodeIdFeatures(argument.bytes()); })).batch_size;
}

py::str NameOf(const IdFeature& feature) {
  PyObject* name = PyUnicode_DecodeUTF8(feature.name.data(),
                                        static_cast<py::ssize_t>(feature.name.size()), nullptr);
  if (name == nullptr) {
    PyErr_Clear();
    RaiseIfError(Corruption("ID features: the name of a feature is not UTF-8"));
  }
  return py::reinterpret_steal<py::str>(name);
}

template <typename T>
py::array_t<T> CopyOf(std::span<const T> values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::list Decode(const py::buffer& message) {
  const BytesArgument argument(message, "message");
  const IdFeatures batch =
      ValueOrRaise(WithoutGil([&] { return DecodeIdFeatures(argument.bytes()); }));
  py::list features;
  for (const IdFeature& feature : batch.features) {
    features.append(py::make_tuple(NameOf(feature), CopyOf(feature.ids), CopyOf(feature.offsets)));
  }
  return features;
}

// A loader's samples are many small arrays (thousands in a batch), so this is the one place that
// walks Python objects in C++. The GIL is kept: the arrays belong to the caller, and copying them
// takes microseconds.
py::array CheckedSample(py::handle sample, const std::string& feature, size_t position) {
  const auto where = [&] {
    return "feature '" + feature + "', sample " + std::to_string(position) + ": ";
  };
  if (!py::isinstance<py::array>(sample)) {
    RaiseTypeError(where() + "expected a 1-D numpy array of uint64, found " +
                   py::type::handle_of(sample).attr("__name__").cast<std::string>() +
                   "; make it one with numpy.array(x, dtype=numpy.uint64)");
  }
  if (!py::array_t<uint64_t>::check_(sample)) {
    RaiseTypeError(where() + "expected dtype uint64, found " +
                   py::str(sample.attr("dtype")).cast<std::string>() +
                   "; convert it with .astype(numpy.uint64)");
  }
  auto array = py::reinterpret_borrow<py::array>(sample);
  if (array.ndim() != 1) {
    RaiseIfError(InvalidArgument(where() + "expected a 1-D array, found " +
                                 std::to_string(array.ndim()) + " dimensions"));
  }
  return array;
}

void AppendSample(const py::array& sample, std::vector<uint64_t>* ids) {
  const auto* bytes = static_cast<const std::byte*>(sample.data());
  const size_t begin = ids->size();
  ids->resize(begin + static_cast<size_t>(sample.size()));
  if (sample.strides(0) == sizeof(uint64_t)) {
    std::memcpy(ids->data() + begin, bytes, static_cast<size_t>(sample.nbytes()));
    return;
  }
  for (py::ssize_t i = 0; i < sample.size(); ++i) {
    std::memcpy(ids->data() + begin + i, bytes + i * sample.strides(0), sizeof(uint64_t));
  }
}

std::pair<py::array_t<uint64_t>, py::array_t<uint32_t>> FlattenSamples(
    const std::string& name, const py::sequence& samples) {
  // A list or tuple of its own: the caller's may change while an error message runs Python code.
  const py::tuple fixed(samples);
  std::vector<uint64_t> ids;
  std::vector<uint32_t> offsets = {0};
  offsets.reserve(fixed.size() + 1);
  for (size_t i = 0; i < fixed.size(); ++i) {
    AppendSample(CheckedSample(fixed[i], name, i), &ids);
    if (ids.size() > std::numeric_limits<uint32_t>::max()) {
      RaiseIfError(
          InvalidArgument("feature '" + name + "': more than 2^32 - 1 IDs; send smaller batches"));
    }
    offsets.push_back(static_cast<uint32_t>(ids.size()));
  }
  return {ArrayFrom(std::move(ids)), ArrayFrom(std::move(offsets))};
}

}  // namespace

void BindIdFeatures(py::module_& module) {
  module.def("encode_id_features", &Encode, py::arg("batch_size"), py::arg("features"));
  module.def("check_id_features", &Check, py::arg("message"));
  module.def("decode_id_features", &Decode, py::arg("message"));
  module.def("flatten_samples", &FlattenSamples, py::arg("name"), py::arg("samples"));
}

}  // namespace persia::bindings

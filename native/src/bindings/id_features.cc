#include "base/id_features.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;

// Arrays of one feature, kept while they are encoded.
struct FeatureArrays {
  std::string name;
  ArrayArgument<uint64_t> ids;
  ArrayArgument<uint32_t> offsets;
  std::optional<ArrayArgument<float>> weights;
};

// Of (name, ids, offsets) or (name, ids, offsets, weights), where weights may be None.
FeatureArrays ArraysOf(const py::tuple& feature) {
  if (feature.size() != 3 && feature.size() != 4) {
    RaiseTypeError("features: expected tuples of name, ids, offsets and weights, found one of " +
                   std::to_string(feature.size()) + " items");
  }
  const auto name = feature[0].cast<std::string>();
  const std::string what = "feature '" + name + "': ";
  FeatureArrays arrays{name, ArrayArgument<uint64_t>(feature[1], what + "ids", 1),
                       ArrayArgument<uint32_t>(feature[2], what + "offsets", 1), std::nullopt};
  if (feature.size() == 4 && !feature[3].is_none()) {
    arrays.weights.emplace(feature[3], what + "weights", 1);
  }
  return arrays;
}

py::bytes EncodeFeatures(uint32_t batch_size, const std::vector<py::tuple>& features) {
  std::vector<FeatureArrays> arrays;
  // The features view the arrays, and these the Python objects, which stay alive until the message
  // is made.
  arrays.reserve(features.size());
  IdFeatures batch{.batch_size = batch_size, .features = {}};
  for (const py::tuple& feature : features) {
    const FeatureArrays& kept = arrays.emplace_back(ArraysOf(feature));
    batch.features.push_back({kept.name, kept.offsets.values(), kept.ids.values()});
    if (kept.weights.has_value()) batch.features.back().weights = kept.weights->values();
  }
  const auto message = ValueOrRaise(WithoutGil([&] { return EncodeIdFeatures(batch); }));
  // Filled without the GIL: megabytes of new memory, for which a training loop would wait.
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(message.size()));
  if (bytes == nullptr) throw py::error_already_set();
  WithoutGil([&] { std::memcpy(PyBytes_AS_STRING(bytes), message.data(), message.size()); });
  return py::reinterpret_steal<py::bytes>(bytes);
}

// Names come from the network: what is no UTF-8 is a corrupt message, not a UnicodeDecodeError.
py::str NameOf(const IdFeature& feature) {
  PyObject* name = PyUnicode_DecodeUTF8(feature.name.data(),
                                        static_cast<py::ssize_t>(feature.name.size()), nullptr);
  if (name == nullptr) {
    PyErr_Clear();
    RaiseIfError(Corruption("ID features: the name of a feature is not UTF-8"));
  }
  return py::reinterpret_steal<py::str>(name);
}

// Copies: the message may be a buffer that its owner writes again.
template <typename T>
py::array_t<T> CopyOf(std::span<const T> values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::list IdFeaturesToList(const py::buffer& message, uint64_t max_id_bytes) {
  const BytesArgument argument(message, "message");
  const IdFeatures batch =
      ValueOrRaise(WithoutGil([&] { return DecodeIdFeatures(argument.bytes(), max_id_bytes); }));
  py::list features;
  for (const IdFeature& feature : batch.features) {
    py::object weights = py::none();
    if (!feature.weights.empty()) weights = CopyOf(feature.weights);
    features.append(py::make_tuple(NameOf(feature), CopyOf(feature.ids), CopyOf(feature.offsets),
                                   std::move(weights)));
  }
  return features;
}

}  // namespace

void BindIdFeatures(py::module_& module) {
  module.def("encode_id_features", &EncodeFeatures, py::arg("batch_size"), py::arg("features"));
  module.def("decode_id_features", &IdFeaturesToList, py::arg("message"),
             py::arg("max_id_bytes") = kMaxIdBytes);
}

}  // namespace persia::bindings

#include "serving/infer_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "serving/proto.h"

namespace persia::serving {
namespace {

using Field = ProtoReader::Field;
using Bytes = std::span<const std::byte>;

constexpr std::string_view kBatchInput = "batch";
constexpr std::string_view kOutput = "output_";
constexpr uint32_t kMaxOutputs = 1024;
constexpr size_t kMaxSizes = 32;  // of a tensor's shape
// The protocol's names of the dtypes by their numbers on the wire.
constexpr std::array<std::string_view, kNumDtypes> kDatatypes = {
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "FP32", "FP64", "FP16"};

// An input as the message has it.
struct Input {
  std::string_view name;
  std::string_view datatype;
  std::vector<uint64_t> shape;
  Bytes contents;
  bool has_contents = false;
  Bytes raw;
};

// A tensor is held in up to 96 bytes, and may have two in the message. So their number is bounded.
struct Message {
  size_t max_tensors = 0;
  bool has_too_many = false;
  std::string_view model_name;
  std::string_view model_version;
  std::string_view id;
  std::vector<Input> inputs;
  std::vector<std::string_view> outputs;
  std::vector<Bytes> raw;
};

bool IsAscii(std::string_view text) {
  return std::none_of(text.begin(), text.end(), [](char c) { return (c & 0x80) != 0; });
}

// False for everything that protobuf permits and clients do not send (groups, merged messages,
// absurd shapes): Python's reader then decides. The field numbers are
// ModelInferRequest.InferInputTensor's.
bool ReadInput(Bytes message, Input* input) {
  ProtoReader reader(message);
  for (Field field; reader.Next(&field);) {
    if (field.Is(1, ProtoReader::kBytes)) {
      input->name = field.text();
    } else if (field.Is(2, ProtoReader::kBytes)) {
      input->datatype = field.text();
    } else if (field.Is(3, ProtoReader::kVarint)) {
      input->shape.push_back(field.value);
      if (input->shape.size() > kMaxSizes) return false;
    } else if (field.Is(3, ProtoReader::kBytes)) {
      ProtoReader sizes(field.bytes);
      while (!sizes.empty() && sizes.ok() && input->shape.size() <= kMaxSizes) {
        input->shape.push_back(sizes.Varint());
      }
      if (!sizes.ok() || input->shape.size() > kMaxSizes) return false;
    } else if (field.number == 5) {
      // Repeated messages of a field would be merged.
      if (field.wire != ProtoReader::kBytes || input->has_contents) return false;
      input->has_contents = true;
      input->contents = field.bytes;
    } else if (field.number < 4) {
      return false;
    }
  }
  return reader.ok();
}

bool ReadOutput(Bytes message, std::string_view* name) {
  ProtoReader reader(message);
  for (Field field; reader.Next(&field);) {
    if (field.number == 1 && field.wire != ProtoReader::kBytes) return false;
    if (field.number == 1) *name = field.text();
  }
  return reader.ok();
}

// Views into `content`. Unknown fields are skipped, as protobuf requires of readers; known ones of
// another wire type are left to Python.
// False: it is not plain, or has too many tensors. What is not plain is counted to the end: Python
// would read all of it.
bool ReadMessage(Bytes content, Message* message) {
  ProtoReader reader(content);
  bool is_plain = true;
  for (Field field; reader.Next(&field);) {
    const bool is_known = field.number <= 7 && field.number != 4;
    is_plain = is_plain && (!is_known || field.wire == ProtoReader::kBytes);
    switch (field.number) {
      case 1: message->model_name = field.text(); break;
      case 2: message->model_version = field.text(); break;
      case 3: message->id = field.text(); break;
      case 5: is_plain = ReadInput(field.bytes, &message->inputs.emplace_back()) && is_plain; break;
      case 6:
        is_plain = ReadOutput(field.bytes, &message->outputs.emplace_back()) && is_plain;
        break;
      case 7: message->raw.push_back(field.bytes); break;
      default: break;
    }
    message->has_too_many = std::max({message->inputs.size(), message->outputs.size(),
                                      message->raw.size()}) > message->max_tensors;
    if (message->has_too_many) return false;
  }
  return reader.ok() && is_plain;
}

// The only element of a BYTES tensor.
std::optional<Bytes> OnlyElement(const Input& input, bool is_raw) {
  if (input.datatype != "BYTES" || input.shape != std::vector<uint64_t>{1}) return std::nullopt;
  if (is_raw) {
    uint32_t length = 0;
    if (input.raw.size() < sizeof(length)) return std::nullopt;
    std::memcpy(&length, input.raw.data(), sizeof(length));
    if (length != input.raw.size() - sizeof(length)) return std::nullopt;
    return input.raw.subspan(sizeof(length));
  }
  constexpr uint32_t kBytesContents = 8;
  std::optional<Bytes> only;
  ProtoReader reader(input.contents);
  for (Field field; reader.Next(&field);) {
    if (!field.Is(kBytesContents, ProtoReader::kBytes) || only.has_value()) return std::nullopt;
    only = field.bytes;
  }
  return reader.ok() ? only : std::nullopt;
}

// An ID beyond the limit would fail the batch that it is merged into, whose other requests would
// then be computed one after another.
bool Fits(const ModelInputs::Ids& wanted, const IdFeature& feature) {
  const auto is_below = [&](uint64_t id) { return id < wanted.limit; };
  return wanted.name == feature.name &&
         (wanted.limit == 0 || std::all_of(feature.ids.begin(), feature.ids.end(), is_below));
}

bool Fits(const ModelInputs::Dense& wanted, const DenseFeature& feature) {
  const auto fits = [](int64_t size, uint64_t found) {
    return size == -1 || static_cast<uint64_t>(size) == found;
  };
  return wanted.name == feature.name && wanted.dtype == feature.dtype &&
         std::equal(wanted.shape.begin(), wanted.shape.end(), feature.shape.begin(),
                    feature.shape.end(), fits);
}

// In the order of the signature: others are arranged in Python.
bool Fits(const ModelInputs& inputs, const Samples& samples) {
  const auto finite = [&](const DenseFeature& feature) {
    return AllFinite(feature.dtype, feature.values);
  };
  if (!inputs.allow_nonfinite && !std::all_of(samples.dense.begin(), samples.dense.end(), finite)) {
    return false;
  }
  if (!inputs.has_signature) return true;
  const auto fits = [](const auto& wanted, const auto& found) { return Fits(wanted, found); };
  return std::equal(inputs.ids.begin(), inputs.ids.end(), samples.ids.features.begin(),
                    samples.ids.features.end(), fits) &&
         std::equal(inputs.dense.begin(), inputs.dense.end(), samples.dense.begin(),
                    samples.dense.end(), fits);
}

// ---- tensors by name

// Copies of the arrays of named tensors, each at a multiple of 8.
class Arrays {
 public:
  explicit Arrays(size_t num_bytes) : memory_(num_bytes) {}

  template <typename T>
  std::span<T> Take(size_t count) {
    auto* begin = reinterpret_cast<T*>(memory_.data() + used_);
    used_ += (count * sizeof(T) + 7) / 8 * 8;
    return {begin, count};
  }
  // Names of the model's inputs may be gone before the request is.
  std::string_view Copy(std::string_view text) {
    const auto copy = Copy<char>(std::as_bytes(std::span(text)));
    return {copy.data(), copy.size()};
  }
  template <typename T>
  std::span<T> Copy(Bytes bytes) {
    const auto array = Take<T>(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(array.data(), bytes.data(), bytes.size());
    return array;
  }
  Buffer Release() { return std::move(memory_); }

 private:
  Buffer memory_;
  size_t used_ = 0;
};

const Input* Find(const std::vector<Input>& inputs, std::string_view name,
                  std::string_view suffix = "") {
  for (const Input& input : inputs) {
    if (input.name.size() == name.size() + suffix.size() && input.name.starts_with(name) &&
        input.name.ends_with(suffix)) {
      return &input;
    }
  }
  return nullptr;
}

bool IsArray(const Input* input, std::string_view datatype, uint64_t count, size_t item_bytes) {
  return input->datatype == datatype && input->shape == std::vector<uint64_t>{count} &&
         input->raw.size() == count * item_bytes;
}

// Offsets of [batch], of [batch, k], or by lengths; false: not of the usual form.
bool ReadOffsets(const Input& input, const Input* lengths, Arrays* arrays, uint32_t* batch_size,
                 IdFeature* feature) {
  const uint64_t num_ids = input.raw.size() / sizeof(uint64_t);
  const auto& shape = input.shape;
  const uint64_t size = lengths != nullptr ? lengths->raw.size() / sizeof(int32_t) : shape[0];
  const uint64_t each = shape.size() == 2 ? shape[1] : 1;
  if (lengths == nullptr && (each > num_ids || size > num_ids || size * each != num_ids))
    return false;
  if (lengths != nullptr &&
      (shape.size() != 1 || !IsArray(lengths, "INT32", size, sizeof(int32_t)))) {
    return false;
  }
  if (size == 0 || size > kMaxBatchSize || (*batch_size != 0 && *batch_size != size)) return false;
  *batch_size = static_cast<uint32_t>(size);
  const auto offsets = arrays->Take<uint32_t>(size + 1);
  uint64_t end = offsets[0] = 0;
  for (uint64_t i = 0; i < size; ++i) {
    int32_t length = 0;
    if (lengths != nullptr) {
      std::memcpy(&length, lengths->raw.data() + i * sizeof(length), sizeof(length));
      if (length < 0) return false;
    }
    end += lengths != nullptr ? static_cast<uint64_t>(length) : each;
    if (end > num_ids) return false;
    offsets[i + 1] = static_cast<uint32_t>(end);
  }
  feature->offsets = offsets;
  return end == num_ids;
}

bool ReadIds(const std::vector<Input>& inputs, const std::string& name, Arrays* arrays,
             Samples* samples, size_t* num_used) {
  const Input* ids = Find(inputs, name);
  const Input* lengths = Find(inputs, name, ".lengths");
  const Input* weights = Find(inputs, name, ".weights");
  if (ids == nullptr || (ids->datatype != "INT64" && ids->datatype != "UINT64")) return false;
  const size_t num_ids = ids->raw.size() / sizeof(uint64_t);
  if (ids->raw.size() % sizeof(uint64_t) != 0 || ids->shape.empty() || ids->shape.size() > 2) {
    return false;
  }
  if (ids->shape.size() == 1 && ids->shape[0] != num_ids) return false;
  IdFeature feature;
  feature.name = arrays->Copy(name);
  if (!ReadOffsets(*ids, lengths, arrays, &samples->ids.batch_size, &feature)) return false;
  feature.ids = arrays->Copy<uint64_t>(ids->raw);
  if (weights != nullptr) {
    if (!IsArray(weights, "FP32", num_ids, sizeof(float))) return false;
    if (!AllFinite(kFloat32, weights->raw)) return false;
    feature.weights = arrays->Copy<float>(weights->raw);
  }
  samples->ids.features.push_back(feature);
  *num_used += 1 + (lengths != nullptr ? 1 : 0) + (weights != nullptr ? 1 : 0);
  return true;
}

bool ReadNamedDense(const std::vector<Input>& inputs, const ModelInputs::Dense& wanted,
                    Arrays* arrays, Samples* samples) {
  const Input* input = Find(inputs, wanted.name);
  if (input == nullptr || input->datatype != kDatatypes[wanted.dtype] || input->shape.empty() ||
      input->shape[0] != samples->size() || wanted.dtype == kBool) {
    return false;
  }
  uint64_t num_bytes = ItemBytes(wanted.dtype);
  for (const uint64_t size : input->shape) {
    if (size > input->raw.size()) return false;  // so that the product below fits 64 bits
    num_bytes *= size;
    if (num_bytes > input->raw.size()) return false;
  }
  if (num_bytes != input->raw.size()) return false;
  samples->dense.push_back({.name = arrays->Copy(wanted.name),
                            .dtype = wanted.dtype,
                            .shape = {input->shape.begin() + 1, input->shape.end()},
                            .values = arrays->Copy<std::byte>(input->raw)});
  return true;
}

std::optional<Samples> ReadNamed(const std::vector<Input>& inputs, const ModelInputs& wanted) {
  size_t num_bytes = 0;
  // Before each is looked for among all.
  if (inputs.size() > 3 * wanted.ids.size() + wanted.dense.size()) return std::nullopt;
  for (const Input& input : inputs) {
    if (input.has_contents) return std::nullopt;
    // Offsets take four bytes a sample, and no tensor has more samples than elements.
    num_bytes += 2 * (input.raw.size() + 16) + input.name.size();
  }
  Arrays arrays(num_bytes);
  Samples samples;
  size_t num_used = wanted.dense.size();
  for (const ModelInputs::Ids& ids : wanted.ids) {
    if (!ReadIds(inputs, ids.name, &arrays, &samples, &num_used)) return std::nullopt;
  }
  for (const ModelInputs::Dense& dense : wanted.dense) {
    if (!ReadNamedDense(inputs, dense, &arrays, &samples)) return std::nullopt;
  }
  // Each was found once, so a repeated or unknown one would be left over.
  if (num_used != inputs.size()) return std::nullopt;
  samples.memory = arrays.Release();
  return samples;
}

// ---- a request

bool ReadOutputs(const std::vector<std::string_view>& names, std::vector<uint32_t>* positions) {
  for (const std::string_view name : names) {
    uint32_t position = 0;
    if (!name.starts_with(kOutput)) return false;
    const auto digits = name.substr(kOutput.size());
    const char* end = digits.data() + digits.size();
    const auto [last, error] = std::from_chars(digits.data(), end, position);
    if (error != std::errc() || last != end || position >= kMaxOutputs ||
        digits != std::to_string(position)) {
      return false;
    }
    positions->push_back(position);
  }
  return true;
}

// Either the bytes of a whole batch, or tensors by name. Typed contents of named tensors are left
// to Python: clients that care for speed send raw ones.
std::optional<Samples> ReadSamples(Message* message, const ModelInputs& inputs) {
  auto& found = message->inputs;
  const bool is_raw = !message->raw.empty();
  if (is_raw) {
    if (message->raw.size() != found.size()) return std::nullopt;
    for (size_t i = 0; i < found.size(); ++i) found[i].raw = message->raw[i];
  }
  if (found.size() == 1 && found[0].name == kBatchInput) {
    const auto content = OnlyElement(found[0], is_raw);
    if (!content.has_value()) return std::nullopt;
    auto samples = DecodeSamples(*content);
    if (!samples.ok()) return std::nullopt;
    return std::move(samples).value();
  }
  if (!inputs.by_name || !is_raw) return std::nullopt;
  return ReadNamed(found, inputs);
}

// A version other than "stable" names a model that only Python knows. IDs that are not ASCII go
// there, too, since it checks UTF-8.
std::optional<InferRequest> Accept(Message* message, const ModelInputs& inputs) {
  const bool is_stable = message->model_version == "stable";
  const bool is_known = is_stable || message->model_version.empty();
  if (!is_known || !IsAscii(message->id)) return std::nullopt;
  InferRequest request;
  request.id = message->id;
  request.is_stable = is_stable;
  if (!ReadOutputs(message->outputs, &request.output_positions)) return std::nullopt;
  auto samples = ReadSamples(message, inputs);
  if (!samples.has_value() || !Fits(inputs, *samples)) return std::nullopt;
  request.samples = *std::move(samples);
  return request;
}

}  // namespace

size_t MaxTensorsOf(const ModelInputs& inputs) {
  constexpr size_t kEnough = 4096;  // for other readers
  return std::max(kEnough, 3 * (inputs.ids.size() + inputs.dense.size()));
}

StatusOr<std::optional<InferRequest>> ReadInferRequest(std::span<const std::byte> content,
                                                       const InputsOfModel& inputs_of,
                                                       size_t max_tensors) {
  Message message;
  message.max_tensors = max_tensors;
  const bool is_read = ReadMessage(content, &message);
  const ModelInputs* inputs = inputs_of(message.model_name);
  if (message.has_too_many) {
    return InvalidArgument("the request has more than ", max_tensors,
                           " inputs or outputs: send those of the model");
  }
  if (!is_read || inputs == nullptr) return std::optional<InferRequest>();
  return Accept(&message, *inputs);
}

}  // namespace persia::serving

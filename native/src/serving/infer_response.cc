#include "serving/infer_response.h"

#include <numeric>

#include "serving/proto.h"

namespace persia::serving {
namespace {

// An entry of map<string, InferParameter>: its key, and a message whose field 1 is true.
void PutMark(const std::string& name, ProtoWriter* writer) {
  std::string parameter;
  ProtoWriter(&parameter).Number(1, 1);
  std::string entry;
  ProtoWriter fields(&entry);
  fields.Bytes(1, name);
  fields.Bytes(2, parameter);
  writer->Bytes(4, entry);
}

// InferOutputTensor: 1 name, 2 datatype, 3 shape. Values are not in it but in field 6 of the
// response (raw_output_contents), which clients read without a copy for each element.
std::string Described(const Output& output, uint32_t position, uint32_t num_samples) {
  std::string shape;
  ProtoWriter sizes(&shape);
  sizes.Varint(num_samples);
  for (const uint64_t size : output.shape) sizes.Varint(size);
  std::string described;
  ProtoWriter fields(&described);
  fields.Bytes(1, "output_" + std::to_string(position));
  fields.Bytes(2, output.datatype);
  fields.Bytes(3, shape);
  return described;
}

}  // namespace

// Written by hand, as the native module links no protobuf: the fields are few, and fixed by the
// Open Inference Protocol (persia/serving/open_inference.proto). The size is computed first, so
// that the message is allocated once.
std::string EncodeInferResponse(const Prediction& prediction, std::string_view id,
                                std::span<const uint32_t> positions, uint32_t begin,
                                uint32_t num_samples) {
  std::vector<uint32_t> all(positions.begin(), positions.end());
  if (all.empty()) {
    all.resize(prediction.outputs.size());
    std::iota(all.begin(), all.end(), 0);
  }
  constexpr size_t kFieldBytes = 128;  // for all but names and values: enough for any
  std::string message;
  size_t size = prediction.model_name.size() + prediction.version.size() + id.size() + kFieldBytes;
  for (const std::string& mark : prediction.marks) size += mark.size() + kFieldBytes;
  for (const uint32_t position : all) {
    size += num_samples * prediction.outputs[position].sample_bytes + kFieldBytes;
  }
  message.reserve(size);
  ProtoWriter writer(&message);
  writer.Bytes(1, prediction.model_name);
  writer.Bytes(2, prediction.version);
  if (!id.empty()) writer.Bytes(3, id);
  for (const std::string& mark : prediction.marks) PutMark(mark, &writer);
  for (const uint32_t position : all) {
    writer.Bytes(5, Described(prediction.outputs[position], position, num_samples));
  }
  for (const uint32_t position : all) {
    const Output& output = prediction.outputs[position];
    const auto values =
        output.values.subspan(begin * output.sample_bytes, num_samples * output.sample_bytes);
    writer.Bytes(6, {reinterpret_cast<const char*>(values.data()), values.size()});
  }
  return message;
}

}  // namespace persia::serving

// ModelInferRequest of the Open Inference Protocol, read without Python where it is plain.
//
// Only requests that are right, and have the usual form, are accepted here. Every other one is left
// to the reader in Python (persia/serving/tensors.py), which takes all forms and explains what is
// wrong with one: no rule has two explanations. What is accepted here must mean the same there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "serving/samples.h"

namespace persia::serving {

// What a request must have to be accepted. Immutable.
struct ModelInputs {
  struct Ids {
    std::string name;
    uint64_t limit = 0;  // its IDs are less than this; 0: any
  };
  struct Dense {
    std::string name;
    uint8_t dtype = 0;
    std::vector<int64_t> shape;  // of a sample; -1: any size
  };

  std::string model_name;
  // Of the signature, in its order. Without one, the bytes of a batch have any features.
  bool has_signature = false;
  std::vector<Ids> ids;
  std::vector<Dense> dense;
  bool by_name = false;  // tensors may be named like features
  bool allow_nonfinite = false;
};

struct InferRequest {
  std::string id;                          // ASCII
  bool is_stable = false;                  // it asks for the version of this label
  std::vector<uint32_t> output_positions;  // that are asked for; empty: all
  Samples samples;
};

// Of the model that a message names; null: its requests are for Python.
using InputsOfModel = std::function<const ModelInputs*(std::string_view)>;

// More inputs or outputs than this are too many for a model.
size_t MaxTensorsOf(const ModelInputs& inputs);

// None: the reader in Python is to take it. kInvalidArgument: it has more than `max_tensors` inputs
// or outputs, and no reader should take it. `inputs_of` is called once, also for such a message.
StatusOr<std::optional<InferRequest>> ReadInferRequest(std::span<const std::byte> message,
                                                       const InputsOfModel& inputs_of,
                                                       size_t max_tensors);

}  // namespace persia::serving

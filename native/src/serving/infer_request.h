// ModelInferRequest of the Open Inference Protocol, read without Python where it is plain.
//
// Only requests that are right, and have the usual form, are accepted here. Every other one is left
// to the reader in Python (persia/serving/tensors.py), which takes all forms and explains what is
// wrong with one: no rule has two explanations. What is accepted here must mean the same there.
#pragma once

#include <cstdint>
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

// The model that a request names; empty: none, or the message cannot be read.
std::string_view ModelNameOf(std::span<const std::byte> message);

// None: the reader in Python is to take it. kInvalidArgument: it has more tensors than any model,
// and no reader should take it.
StatusOr<std::optional<InferRequest>> ReadInferRequest(std::span<const std::byte> message,
                                                       const ModelInputs& inputs);

}  // namespace persia::serving

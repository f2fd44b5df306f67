// ModelInferResponse of the Open Inference Protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace persia::serving {

// One output of a batch: the values of one sample after the other.
struct Output {
  std::string datatype;         // the protocol's name
  std::vector<uint64_t> shape;  // of a sample
  size_t sample_bytes = 0;
  std::span<const std::byte> values;
};

// What a batch was answered with. The values live as long as the caller keeps them.
struct Prediction {
  std::string model_name;
  std::string version;
  std::vector<std::string> marks;  // parameters that are true
  std::vector<Output> outputs;
};

// The answer to the request `id`, whose samples begin at `begin` of the batch. `positions` selects
// outputs, in that order; empty: all. Each must exist.
std::string EncodeInferResponse(const Prediction& prediction, std::string_view id,
                                std::span<const uint32_t> positions, uint32_t begin,
                                uint32_t num_samples);

}  // namespace persia::serving

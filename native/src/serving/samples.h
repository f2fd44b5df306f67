// Samples: the features of one request, and how those of several requests become one batch.
//
// A batch crosses to Python as the wire format's "whole batch" (docs/wire_format.md), which has one
// decoder there. So what is merged here is what a client could have sent as one request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/id_features.h"
#include "base/status.h"

namespace persia::serving {

// A dense feature's dtype is its number on the wire.
inline constexpr uint8_t kBool = 0;
inline constexpr uint8_t kFloat32 = 8;
inline constexpr uint8_t kNumDtypes = 11;
uint32_t ItemBytes(uint8_t dtype);
// Whether all numbers are finite; true for integers.
bool AllFinite(uint8_t dtype, std::span<const std::byte> values);

struct DenseFeature {
  std::string_view name;
  uint8_t dtype = 0;
  std::vector<uint64_t> shape;  // of a sample
  std::span<const std::byte> values;
};

// Views of `memory`. Movable; the views stay valid.
struct Samples {
  IdFeatures ids;  // of at least one sample
  std::vector<DenseFeature> dense;
  Buffer memory;
  bool is_batch = false;  // `memory` is what `PersiaBatch.to_bytes` made, with labels and metadata

  uint32_t size() const { return ids.batch_size; }
  uint64_t memory_bytes() const { return memory.size() + ids.storage_bytes; }
};

// Of a request's unpacked IDs, as many as the message has bytes, or as the largest message has by
// default (GrpcOptions). persia/serving/tensors.py has the same bound.
inline constexpr uint64_t kMaxSampleIdBytes = uint64_t{16} << 20;

// A copy of what `PersiaBatch.to_bytes` made; labels and metadata are left out. kResourceExhausted:
// its IDs take more memory than kMaxSampleIdBytes and more than `content`. kCorruption or
// kInvalidArgument for anything else.
StatusOr<Samples> DecodeSamples(std::span<const std::byte> content);

// Whether both can be parts of one batch: names in order, weights, dtypes and shapes of a sample.
bool HaveOneLayout(const Samples& a, const Samples& b);

// One whole batch of all samples in order. At least one part; all must have one layout.
// kInvalidArgument: they do not fit one batch.
StatusOr<std::vector<std::byte>> Merge(std::span<const Samples* const> parts);

}  // namespace persia::serving

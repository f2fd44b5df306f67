// ID features: the sparse half of a batch as it crosses
// the network (docs/wire_format.md), for both ends.
//
// The encoder refuses what the decoder would, so that a loader hears of its mistake, not the
// embedding worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace persia {

// As in the published system, whose sample numbers have 16 bits.
inline constexpr uint32_t kMaxBatchSize = 65535;

// Of IDs that a decoder unpacks: as much as the largest message (net/types.h).
inline constexpr uint64_t kMaxIdBytes = uint64_t{1} << 30;

// Sample s of a batch has ids[offsets[s] .. offsets[s + 1]).
struct IdFeature {
  // The slot's name in the embedding config. UTF-8 is not checked here.
  std::string_view name;
  std::span<const uint32_t> offsets;  // [batch_size + 1], from 0 to num_ids(), never decreasing
  std::span<const uint64_t> ids;
  std::span<const float> weights = {};  // one an ID, finite; empty: all 1
  // Decoded with Numbering::kKeep: `ids` are distinct ones, and ID i is ids[numbers[i]]. Empty:
  // `ids` are all IDs.
  std::span<const uint32_t> numbers = {};

  size_t num_ids() const { return numbers.empty() ? ids.size() : numbers.size(); }
};

// What a decoder does with IDs that the encoder has numbered.
enum class Numbering : uint8_t { kExpand, kKeep };

struct IdFeatures {
  uint32_t batch_size = 0;
  std::vector<IdFeature> features;
  // What decoded features view beside the message.
  std::vector<std::shared_ptr<const void>> storage = {};
  uint64_t storage_bytes = 0;
};

// Numbers the IDs of a feature where distinct IDs and numbers are fewer bytes. kInvalidArgument: no
// feature, a repeated or empty name, a batch size above kMaxBatchSize, offsets
// that do not fit, weights that do not fit or are not finite.
StatusOr<std::vector<std::byte>> EncodeIdFeatures(const IdFeatures& batch);

// Views into the result and into `message`, which must start at a multiple of 8 and outlive them.
// Unpacked IDs may take 8 times the memory of the message. kResourceExhausted: they take more than
// `max_id_bytes`. kCorruption: not the form of the wire format; otherwise as EncodeIdFeatures.
StatusOr<IdFeatures> DecodeIdFeatures(std::span<const std::byte> message,
                                      uint64_t max_id_bytes = kMaxIdBytes,
                                      Numbering numbering = Numbering::kExpand);

}  // namespace persia

// DecodeIdFeatures: what it lets through lies inside the message, and survives a round trip.
#include <algorithm>
#include <cstdlib>

#include "aligned_input.h"
#include "base/id_features.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using persia::DecodeIdFeatures;
  const persia::Buffer message = persia::fuzz::AlignedInput(data, size);
  const auto batch = DecodeIdFeatures(message.span());
  if (!batch.ok()) return 0;
  for (const auto& feature : batch.value().features) {
    persia::fuzz::Touch(feature.name);
    persia::fuzz::Touch(feature.offsets);
    persia::fuzz::Touch(feature.ids);
    persia::fuzz::Touch(feature.weights);
    if (!feature.weights.empty() && feature.weights.size() != feature.ids.size()) std::abort();
    if (feature.offsets.size() != batch.value().batch_size + size_t{1}) std::abort();
    if (feature.offsets.back() != feature.ids.size()) std::abort();
  }
  const auto again = persia::EncodeIdFeatures(batch.value());
  if (!again.ok() || !DecodeIdFeatures(again.value()).ok()) std::abort();
  return 0;
}

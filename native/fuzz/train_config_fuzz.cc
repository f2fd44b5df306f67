// TrainConfig::Decode: what it lets through is valid and survives a round trip.
#include <cstdlib>

#include "aligned_input.h"
#include "base/train_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using persia::TrainConfig;
  const persia::Buffer body = persia::fuzz::AlignedInput(data, size);
  auto config = TrainConfig::Decode(body.span());
  if (!config.ok()) return 0;
  if (!config->Validate().ok()) std::abort();
  auto again = TrainConfig::Decode(config->Encode());
  if (!again.ok() || !(*again == *config)) std::abort();
  return 0;
}

// ReadInferRequest: what it accepts fits the model, lies inside its memory, and becomes a batch
// that is accepted again.
#include <cstdlib>
#include <string>

#include "aligned_input.h"
#include "serving/infer_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia::serving;  // NOLINT: a program of its own
  static const ModelInputs inputs = {.model_name = "m",
                                     .has_signature = true,
                                     .ids = {{"user"}, {"item", 1000}},
                                     .dense = {{"age", 8, {1}}, {"price", 9, {-1}}},
                                     .by_name = true,
                                     .allow_nonfinite = false};
  const persia::Buffer message = persia::fuzz::AlignedInput(data, size);
  const auto read = ReadInferRequest(
      message.span(), [](std::string_view) { return &inputs; }, MaxTensorsOf(inputs));
  if (!read.ok() || !read.value().has_value()) return 0;
  const auto& request = read.value();
  const Samples& samples = request->samples;
  if (samples.ids.features.size() != 2 || samples.dense.size() != 2) std::abort();
  for (const auto& feature : samples.ids.features) {
    persia::fuzz::Touch(feature.name);
    persia::fuzz::Touch(feature.offsets);
    persia::fuzz::Touch(feature.ids);
    persia::fuzz::Touch(feature.weights);
    if (feature.offsets.size() != samples.size() + size_t{1}) std::abort();
    if (feature.offsets.back() != feature.ids.size()) std::abort();
    for (const uint64_t id : feature.ids) {
      if (feature.name == "item" && id >= 1000) std::abort();
    }
  }
  for (const auto& feature : samples.dense) {
    persia::fuzz::Touch(feature.values);
    if (!AllFinite(feature.dtype, feature.values)) std::abort();
  }
  const std::vector<const Samples*> twice = {&samples, &samples};
  const auto merged = Merge(twice);
  // Twice as many samples may be too many.
  if (!merged.ok()) return 0;
  const auto again = DecodeSamples(merged.value());
  if (!again.ok() || !HaveOneLayout(again.value(), samples)) std::abort();
  return 0;
}

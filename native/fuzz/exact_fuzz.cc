// Messages of consistency="exact": what their decoders let through lies inside the body.
#include "aligned_input.h"
#include "worker/exact_protocol.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia;  // NOLINT: a fuzz target is one function
  const Buffer body = fuzz::AlignedInput(data, size);
  if (auto request = worker::LookupWholeRequest::Decode(body.span()); request.ok()) {
    fuzz::Touch(request->wanted);
    fuzz::Touch(request->id_features);
  }
  if (auto request = worker::OrderedGradientsRequest::Decode(body.span()); request.ok()) {
    for (const worker::SlotGradient& gradient : request->gradients.gradients) {
      fuzz::Touch(std::span(gradient.rows, uint64_t{gradient.num_rows} * gradient.dim));
    }
  }
  auto answer = worker::WholeRows::Decode(fuzz::AlignedInput(data, size));
  if (answer.ok()) {
    for (const auto& rows : answer->rows) fuzz::Touch(rows);
  }
  return 0;
}

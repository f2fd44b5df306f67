// GradientsRequest: what it lets through lies inside the body, and survives a round trip.
#include <cstdlib>
#include <vector>

#include "aligned_input.h"
#include "worker/worker_protocol.h"

namespace persia::fuzz {
namespace {

void Read(const worker::SlotGradient& gradient) {
  Touch(gradient.slot);
  if (gradient.skipped && gradient.num_rows != 0) std::abort();
  Touch(std::span(gradient.rows, uint64_t{gradient.num_rows} * gradient.dim));
}

Buffer Flatten(const Segments& segments) {
  std::vector<std::byte> bytes;
  for (const auto& view : segments.views) bytes.insert(bytes.end(), view.begin(), view.end());
  return AlignedInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia;  // NOLINT: a fuzz target is one function
  const Buffer body = fuzz::AlignedInput(data, size);
  auto request = worker::GradientsRequest::Decode(body.span());
  if (!request.ok()) return 0;
  for (const worker::SlotGradient& gradient : request->gradients) fuzz::Read(gradient);
  const size_t num_gradients = request->gradients.size();
  const Buffer again = fuzz::Flatten(EncodeMessage(std::move(*request)));
  auto second = worker::GradientsRequest::Decode(again.span());
  if (!second.ok() || second->gradients.size() != num_gradients) std::abort();
  return 0;
}

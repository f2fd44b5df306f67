// DecodeGradients: what it lets through lies inside the body, and survives a round trip.
#include <cstdlib>
#include <vector>

#include "aligned_input.h"
#include "worker/gradients_codec.h"

namespace persia::fuzz {
namespace {

void Read(const worker::SlotGradient& gradient) {
  Touch(gradient.slot);
  if (gradient.skipped && gradient.num_rows != 0) std::abort();
  Touch(std::span(gradient.rows, uint64_t{gradient.num_rows} * gradient.dim));
}

Buffer Flatten(const net::Parts& parts) {
  std::vector<std::byte> bytes;
  for (const auto& view : parts.views) bytes.insert(bytes.end(), view.begin(), view.end());
  return AlignedInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia;  // NOLINT: a fuzz target is one function
  const Buffer body = fuzz::AlignedInput(data, size);
  auto request = worker::DecodeGradients(body.span());
  if (!request.ok()) return 0;
  for (const worker::SlotGradient& gradient : request->gradients) fuzz::Read(gradient);
  const Buffer again = fuzz::Flatten(
      worker::EncodeGradients(request->reference, request->scale, request->gradients));
  auto second = worker::DecodeGradients(again.span());
  if (!second.ok() || second->gradients.size() != request->gradients.size()) std::abort();
  return 0;
}

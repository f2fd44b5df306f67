// DecodeReport: what it lets through is encoded to the same bytes, but for those that are reserved.
#include <cstdlib>

#include "aligned_input.h"
#include "worker/gradients_codec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia;  // NOLINT: a fuzz target is one function
  const Buffer body = fuzz::AlignedInput(data, size);
  auto report = worker::DecodeReport(body.span());
  if (!report.ok()) return 0;
  const auto bytes = worker::EncodeReport(*report);
  if (bytes.size() != size) std::abort();
  auto again = worker::DecodeReport(bytes);
  if (!again.ok() || worker::EncodeReport(*again) != bytes) std::abort();
  return 0;
}

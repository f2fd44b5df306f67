// ReturnReport: what it lets through is encoded to the same bytes, but for those that are reserved.
#include <algorithm>
#include <cstdlib>

#include "aligned_input.h"
#include "worker/worker_protocol.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia;  // NOLINT: a fuzz target is one function
  const Buffer body = fuzz::AlignedInput(data, size);
  auto report = worker::ReturnReport::Decode(body.span());
  if (!report.ok()) return 0;
  const Segments bytes = EncodeMessage(*report);
  if (bytes.size_bytes() != size) std::abort();
  auto again = worker::ReturnReport::Decode(bytes.views[0]);
  if (!again.ok()) std::abort();
  const Segments second = EncodeMessage(*again);
  if (!std::ranges::equal(second.views[0], bytes.views[0])) std::abort();
  return 0;
}

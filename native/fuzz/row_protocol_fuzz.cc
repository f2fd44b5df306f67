// The parameter server's request and reply bodies: the first byte chooses the decoder.
#include <cstdlib>

#include "aligned_input.h"
#include "base/row_protocol.h"

namespace persia::fuzz {
namespace {

void Check(const RowBlocksView& view, uint64_t num_floats) {
  if (view.num_floats != num_floats) std::abort();
  uint64_t num_signs = 0;
  for (const RowBlockHeader& block : view.blocks) num_signs += block.num_signs;
  if (num_signs != view.signs.size()) std::abort();
  Touch(view.signs);
}

void Decode(uint8_t choice, std::span<const std::byte> body) {
  if (choice % 6 == 0) {
    auto request = DecodeLookupRequest(body);
    if (request.ok()) Check(request->blocks, request->blocks.num_floats);
  } else if (choice % 6 == 1) {
    auto request = DecodeUpdateRequest(body);
    if (!request.ok()) return;
    Check(request->blocks, request->gradients.size());
    Touch(request->gradients);
  } else if (choice % 6 == 2) {
    auto request = DecodeSetRowsRequest(body);
    if (!request.ok()) return;
    Check(request->blocks, request->rows.size());
    Touch(request->rows);
  } else if (choice % 6 == 3) {
    auto request = DecodePrefetchRequest(body);
    if (request.ok()) Touch(request->signs);
  } else if (choice % 6 == 4) {
    static_cast<void>(DecodePrefetchReply(body));
  } else {
    std::span<const float> rows;
    auto reply = DecodeLookupReply(body, choice, &rows);
    if (reply.ok() && rows.size() != choice) std::abort();
    Touch(rows);
  }
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return -1;
  const persia::Buffer body = persia::fuzz::AlignedInput(data + 1, size - 1);
  persia::fuzz::Decode(data[0], body.span());
  return 0;
}
